"""Tasks: the protocol of environments, two complete ones, chats, and wrappers that add faults or delays.

A prompt and the token ids sampled in each turn enter; token ids to append and one finite reward per episode leave. What
is not the policy's fault leaves as an `EnvironmentFailure`, never as a reward of 0. This room never imports jax.
"""
