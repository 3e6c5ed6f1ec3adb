"""From logits to an id."""
