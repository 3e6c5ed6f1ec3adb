"""Dense linear layers."""
