"""FP8: E4M3 values with one float32 scale per tensor."""
