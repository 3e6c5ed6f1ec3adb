"""An exam for small chat models: fixed questions, and what counts as an answer."""
