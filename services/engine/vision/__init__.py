"""The vision side: what of a checkpoint belongs to it."""
