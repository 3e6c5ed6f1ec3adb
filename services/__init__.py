"""Thimble's processes: engine (one GPU, token ids), api (text, HTTP), tools (the `thimble` command)."""
