"""The engine on one GPU: weights, states and keys there, routed experts where their bytes lie."""
