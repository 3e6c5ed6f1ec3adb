"""The `thimble` command and what it runs."""
