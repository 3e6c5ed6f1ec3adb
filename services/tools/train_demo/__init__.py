"""Training the demo checkpoint: text, network, loop, export."""
