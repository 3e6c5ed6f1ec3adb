"""Sums and elementary functions with the same bits whatever the shape."""
