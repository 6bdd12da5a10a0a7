"""Environments: prompts in, token ids out, one finite reward per episode. This room never imports jax."""
