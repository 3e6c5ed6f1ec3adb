"""The host library: expert blocks cached in RAM, read from disk, computed by the worker pool."""
