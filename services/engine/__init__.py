"""The engine: one process, one device, token ids in and out. Knows nothing of text."""
