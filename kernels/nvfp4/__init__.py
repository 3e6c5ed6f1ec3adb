"""NVFP4: 4-bit E2M1 codes, an E4M3 scale per 16 of them, a float32 scale per tensor."""
