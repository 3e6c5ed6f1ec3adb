"""Causal grouped-query attention without positions."""
