"""The routed experts of a MoE layer: one exact arithmetic, and the fast paths that are equal to it."""
