"""Numerics. Imports torch, numpy and triton, never services/.

Keep this file free of imports: transformers probes a package of this name (Hugging Face's `kernels`) by importing it.
"""
