"""Rewards: verifiers of answers and the check that a reward is one finite scalar. This room never imports jax."""
