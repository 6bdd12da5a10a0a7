"""Group-relative advantages, as in GRPO (arXiv 2402.03300): every rollout is compared with others of the same prompt.

They need no critic, but groups: `rollout.group_size` rollouts of every prompt in one batch.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.algorithm import pieces, tokens
from sao_jax.algorithm.reductions import ROUNDING
from sao_jax.config import AlgorithmConfig
from sao_jax.errors import ConfigError
from sao_jax.types import TrajectoryBatch

EPSILON = 1e-6  # beside the standard deviation


def group_advantages(
  rewards: Float[Array, "N"], group_ids: Int[Array, "N"], members: Bool[Array, "N"], *, standardise: bool = True
) -> Float[Array, "N"]:
  """(R - mean) / (std + 1e-6) within each group, with the sample standard deviation (denominator n - 1). fp32.

  Args:
    rewards: one per entry.
    group_ids: the group of each entry, in [0, N].
    members: True on the entries that count; there is one for every rollout.
    standardise: False leaves it at R - mean.

  Returns:
    The advantages; 0 where all rewards of a group are equal to the rounding of fp32, in a group of one, and outside
    `members`.
  """
  groups = {"segment_ids": group_ids, "num_segments": rewards.shape[0] + 1}
  over_group = functools.partial(jax.ops.segment_sum, **groups)
  rewards = jnp.where(members, rewards.astype(jnp.float32), 0.0)

  # Relative to the group's best, equal rewards are exactly 0: the rounding of a mean is no advantage.
  best = jax.ops.segment_max(jnp.where(members, rewards, -jnp.inf), **groups)[group_ids]
  behind = jnp.where(members, rewards - best, 0.0)
  size = over_group(members.astype(jnp.float32))[group_ids]
  mean = over_group(behind)[group_ids] / jnp.maximum(size, 1.0)

  centred = jnp.where(members, behind - mean, 0.0)
  deviation = jnp.sqrt(over_group(jnp.square(centred))[group_ids] / jnp.maximum(size - 1.0, 1.0))

  # Nor is the rounding of the rewards themselves, such as sums in another order: 1000.3 has neighbours 6e-5 away.
  largest = jax.ops.segment_max(jnp.abs(rewards), **groups)[group_ids]
  scale = deviation + EPSILON if standardise else 1.0
  return jnp.where(deviation <= ROUNDING * largest, 0.0, centred / scale)


def grpo_advantages(
  config: AlgorithmConfig, batch: TrajectoryBatch, state_values: Float[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
  """The group-relative advantage of each trajectory on all of its sampled tokens, 0 elsewhere.

  The trajectories of a group may lie in different rows. One without a sampled token is no member of its group; one that
  `truncation="mask"` leaves out of the losses is.

  Raises:
    ConfigError: the batch was packed without groups.
  """
  del config, state_values
  return _of_batch(batch, standardise=True)


def dr_grpo_advantages(
  config: AlgorithmConfig, batch: TrajectoryBatch, state_values: Float[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
  """R - mean of the group, undivided (Dr. GRPO, arXiv 2503.20783); otherwise as `grpo_advantages`."""
  del config, state_values
  return _of_batch(batch, standardise=False)


def _of_batch(batch: TrajectoryBatch, *, standardise: bool) -> Float[Array, "B T"]:
  if batch.group_ids is None:
    raise ConfigError(
      "rollout.group_size", "the batch has no groups to compare rollouts within.", "Set it to 2 or more."
    )
  sampled = tokens.sampled_tokens(batch)
  # One entry for each trajectory: its last sampled token.
  last = pieces.last_sampled_tokens(batch, sampled)
  flat = (pieces.returns(batch).ravel(), batch.group_ids.ravel(), last.ravel())
  entries = group_advantages(*flat, standardise=standardise).reshape(last.shape)
  return jnp.where(sampled, pieces.trajectory_totals(entries, batch), 0.0)
