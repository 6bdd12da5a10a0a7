"""Data: the built-in tokenizer and checkpointable prompt sources. This room never imports jax itself."""
