"""Rewards: verifiers of answers, worker processes for graders, and the check that a reward is one finite scalar.

An answer goes in; a number or a `GraderFailure` comes out, never a silent 0. This room never imports jax.
"""
