"""A small tower and projector for the demo model: pictures to learn from, the training, the score of the outcome."""
