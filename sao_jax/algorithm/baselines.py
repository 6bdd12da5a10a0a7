"""Advantages from groups of rollouts of one prompt, as in GRPO: what one rollout per prompt is compared with."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from sao_jax.errors import ConfigError

EPSILON = 1e-6  # beside the standard deviation


def group_advantages(rewards: Float[Array, "groups n"]) -> Float[Array, "groups n"]:
  """(R - mean) / std of each group, with the sample standard deviation (n - 1); 0 where all rewards are equal. fp32.

  Raises:
    ConfigError: groups of one, whose statistics are 0 or undefined for ever: nothing would be learnt.
  """
  size = rewards.shape[-1]
  if size < 2:
    raise ConfigError(
      "rewards", f"groups of {size} rollouts have no statistics.", "Use groups of two or more, or the value network."
    )
  rewards = rewards.astype(jnp.float32)
  centred = rewards - jnp.mean(rewards, axis=-1, keepdims=True, dtype=jnp.float32)
  variance = jnp.sum(jnp.square(centred), axis=-1, keepdims=True, dtype=jnp.float32) / (size - 1)
  return centred / (jnp.sqrt(variance) + EPSILON)
