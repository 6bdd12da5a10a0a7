"""From a packed batch and the critic's values to targets and advantages (arXiv 2607.07508, eq. 4-5), for all rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sao_jax.algorithm import scans
from sao_jax.algorithm.advantage import one_minus_lambda, packed_gae, packed_returns
from sao_jax.config import AlgorithmConfig
from sao_jax.types import TrajectoryBatch

_at_segment_end = jax.vmap(scans.at_segment_end)
_before_token = jax.vmap(scans.before_token)
_segment_starts = jax.vmap(scans.segment_starts)
_segment_totals = jax.vmap(scans.segment_totals)


def sampled_tokens(batch: TrajectoryBatch) -> Bool[Array, "B T"]:
  """The tokens that targets and advantages run over; n of a trajectory is their number.

  A segment's first token has no prefix in its segment, so neither a log-probability nor a value: it is context.
  """
  return batch.action_mask & (batch.segment_ids > 0) & ~_segment_starts(batch.segment_ids)


def trained_tokens(batch: TrajectoryBatch, truncation: str) -> Bool[Array, "B T"]:
  """The sampled tokens that enter losses, whitening and statistics.

  Their number is the denominator N of both losses: tokens that DIS rejects count, tokens that were masked before the
  step do not, just as those of a dropped trajectory do not. A sampled token outside `loss_mask` keeps its
  place in the recursion of the others. With `truncation="mask"` truncated trajectories are left out as a whole.
  """
  mask = sampled_tokens(batch) & batch.loss_mask
  return mask & ~batch.truncated if truncation == "mask" else mask


def token_values(state_values: Float[Array, "B T"], batch: TrajectoryBatch) -> Float[Array, "B T"]:
  """V of the state before each token, from V of the state after each token."""
  return _before_token(state_values, batch.segment_ids)


def token_outputs(outputs: Float[Array, "B T O"], batch: TrajectoryBatch) -> Float[Array, "B T O"]:
  """`token_values` for all outputs of a value head."""
  return _before_token(outputs, batch.segment_ids)


def sampled_per_trajectory(batch: TrajectoryBatch, mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
  """n of each token's trajectory: the number of its tokens in `mask`."""
  return _segment_totals(mask, batch.trajectory_ids)


def _bootstrap_values(
  config: AlgorithmConfig, batch: TrajectoryBatch, state_values: Float[Array, "B T"]
) -> Float[Array, "B T"] | None:
  """V behind the last token of truncated trajectories, 0 behind true ends; None when nothing is bootstrapped."""
  if config.truncation != "bootstrap":
    return None
  return jnp.where(batch.truncated, _at_segment_end(state_values, batch.trajectory_ids), 0.0)


def targets_need_values(config: AlgorithmConfig) -> bool:
  """False if the critic's targets are sums of rewards alone, whatever the values are (the paper's setting)."""
  return config.critic_lambda != 1.0 or config.truncation == "bootstrap"


def value_targets(
  config: AlgorithmConfig, batch: TrajectoryBatch, state_values: Float[Array, "B T"] | None
) -> Float[Array, "B T"]:
  """λ_critic-returns; exactly R on every sampled token for γ = λ_critic = 1. Never from the policy's λ.

  `state_values` are those before the updates on this batch; None if not `targets_need_values(config)`.
  """
  if state_values is None:
    state_values = jnp.zeros(batch.token_ids.shape, jnp.float32)
  return jax.vmap(functools.partial(packed_returns, gamma=config.gamma))(
    batch.rewards,
    token_values(state_values, batch),
    sampled_tokens(batch),
    batch.trajectory_ids,
    one_minus_lam=jnp.full(state_values.shape, 1.0 - config.critic_lambda, jnp.float32),
    bootstrap_values=_bootstrap_values(config, batch, state_values),
  )


def critic_advantages(
  config: AlgorithmConfig, batch: TrajectoryBatch, state_values: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """Skip-observation GAE with the length-adaptive λ of each trajectory, of all sampled tokens, before any whitening."""
  mask = sampled_tokens(batch)
  return jax.vmap(functools.partial(packed_gae, gamma=config.gamma))(
    batch.rewards,
    token_values(state_values, batch),
    mask,
    batch.trajectory_ids,
    one_minus_lam=one_minus_lambda(sampled_per_trajectory(batch, mask), config.alpha),
    bootstrap_values=_bootstrap_values(config, batch, state_values),
  )


def batch_metrics(batch: TrajectoryBatch, mask: Bool[Array, "B T"]) -> dict[str, Float[Array, ""]]:
  """Counts and the mean reward per trajectory (truncated ones included); NaN if the batch has none. fp32."""
  first = _segment_starts(batch.trajectory_ids) & (batch.trajectory_ids > 0)
  count = lambda where: jnp.sum(where, dtype=jnp.float32)
  trajectories = count(first)
  return {
    "num_tokens": count(batch.segment_ids > 0),
    "num_sampled_tokens": count(sampled_tokens(batch)),
    "num_trained_tokens": count(mask),
    "num_trajectories": trajectories,
    "num_truncated": count(first & batch.truncated),
    "num_untrained": count(first & (sampled_per_trajectory(batch, mask) == 0.0)),
    "reward_mean": jnp.sum(jnp.where(batch.action_mask, batch.rewards, 0.0)) / trajectories,
  }
