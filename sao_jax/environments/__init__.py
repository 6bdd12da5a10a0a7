"""Environments: the tasks that a policy learns, as episodes of token ids that end with one finite reward.

An environment's settings live in the run's configuration. They offer prompts and make one `Environment` per episode.
Token ids, rewards, and failures that name the environment leave the room. This room never imports jax.
"""
