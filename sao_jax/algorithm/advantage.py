"""The estimator `sao`: token-level GAE that skips observations; the critic's targets; whitening (2607.07508, eq. 4-5).

Maths on one row [T], batched by `jax.vmap`. Everything is token-aligned: values[t] = V(state before token t). The
sampled tokens of a trajectory are numbered 0 ... n-1 across the observations between them, and

    G_k = r_k + γ ((1 - λ) V_{k+1} + λ G_{k+1})          G_n = V_n = bootstrap value, 0 at a true end
    A_k = G_k - V_k                                      λ = 1 - 1 / (α n)

which is δ_k + γ λ A_{k+1} with δ_k = r_k + γ V_{k+1} - V_k, summed differently: here 1 - λ enters as itself, so it can
be given exactly as 1 / (α n); and for γ = λ = 1 the target G_k is the sum of the rewards from k on, exactly R for one
terminal reward, whatever the values are.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from sao_jax.algorithm import pieces, tokens
from sao_jax.algorithm.reductions import masked_mean_and_std
from sao_jax.algorithm.td_steps import Steps, lambda_length, td_steps
from sao_jax.config import AlgorithmConfig
from sao_jax.types import TrajectoryBatch

SMALLEST_SPREAD = 1e-4  # of what is whitened: the root of what is added to the variance


def one_minus_lambda(num_sampled_tokens: Num[Array, "*shape"] | int, alpha: float = 1.5) -> Float[Array, "*shape"]:
  """1 - λ = 1 / (α n), without the cancellation of forming λ first. n = 0 counts as 1."""
  return 1.0 / (alpha * jnp.maximum(jnp.asarray(num_sampled_tokens, jnp.float32), 1.0))


def length_adaptive_lambda(
  num_sampled_tokens: Num[Array, "*shape"] | int, alpha: float = 1.5
) -> Float[Array, "*shape"]:
  """λ = 1 - 1 / (α n). n counts *sampled* tokens, not the length of the response. fp32.

  >>> [float(length_adaptive_lambda(n)) for n in (1, 10)]
  [0.3333333..., 0.9333333...]
  """
  return 1.0 - one_minus_lambda(num_sampled_tokens, alpha)


def place_terminal_reward(reward: Num[Array, ""] | float, action_mask: Bool[Array, "T"]) -> Float[Array, "T"]:
  """One trajectory's reward on its last *sampled* token, 0 elsewhere; all 0 without a sampled token. fp32."""
  action_mask = jnp.asarray(action_mask, jnp.bool_)
  last = tokens.last_sampled(action_mask, jnp.ones(action_mask.shape, jnp.int32))
  return jnp.where(last, jnp.asarray(reward, jnp.float32), 0.0)


def packed_returns(
  rewards: Float[Array, "T"],
  values: Float[Array, "T"],
  action_mask: Bool[Array, "T"],
  trajectory_ids: Int[Array, "T"],
  *,
  one_minus_lam: Float[Array, "T"],
  gamma: float = 1.0,
  bootstrap_values: Float[Array, "T"] | None = None,
) -> Float[Array, "T"]:
  """λ-returns G of the trajectories of one packed row. fp32, 0 where not sampled.

  Args:
    rewards: per token; only those of sampled tokens are read.
    values: V of the state before each token; only those of sampled tokens are read.
    action_mask: True on sampled tokens.
    trajectory_ids: the trajectory that a token belongs to; 0 on padding.
    one_minus_lam: 1 - λ for the token's trajectory, from `one_minus_lambda`.
    gamma: static discount per sampled token.
    bootstrap_values: V behind the end of the token's trajectory; None: all trajectories truly end.
  """
  chex.assert_rank(action_mask, 1)
  chex.assert_equal_shape([rewards, values, action_mask, trajectory_ids, one_minus_lam])
  rewards, values, one_minus_lam = (jnp.asarray(x, jnp.float32) for x in (rewards, values, one_minus_lam))
  end_values = jnp.zeros_like(values) if bootstrap_values is None else jnp.asarray(bootstrap_values, jnp.float32)

  # G_k = d_k + (1 - u_k) G_{k+1}. Sampled: u = 1 - γλ, and 1 on the last one, which looks at nothing behind it.
  last = tokens.last_sampled(action_mask, trajectory_ids)
  middle = rewards + gamma * one_minus_lam * tokens.next_sampled(values, action_mask)
  final = rewards + gamma * end_values
  decay_complement = (1.0 - gamma) + gamma * one_minus_lam

  # Observations: u = 0 and d = 0, so that G passes through them unchanged.
  complement = jnp.where(action_mask, jnp.where(last, 1.0, decay_complement), 0.0)
  offset = jnp.where(action_mask, jnp.where(last, final, middle), 0.0)
  return jnp.where(action_mask, tokens.affine_scan(complement, offset, reverse=True), 0.0)


def skip_observation_gae(
  rewards: Num[Array, "T"],
  values: Num[Array, "T"],
  action_mask: Bool[Array, "T"],
  *,
  lam: Num[Array, ""] | float,
  gamma: float = 1.0,
  bootstrap_value: Num[Array, ""] | float = 0.0,
) -> Float[Array, "T"]:
  """Advantages of one trajectory, arXiv 2607.07508, eq. 4-5.

  Args:
    rewards: per token, read on sampled tokens; `place_terminal_reward` makes them from one terminal reward.
    values: V of the state before each token, read on sampled tokens; what stands on observations does not matter.
    action_mask: True on sampled tokens.
    lam: λ of this trajectory. 1 - λ is formed in the precision that λ has (a Python float is double); the train step
      avoids even that, see `packed_returns`.
    gamma: static discount per sampled token.
    bootstrap_value: V(s_n) of a trajectory that was cut; 0 at a true end.

  Returns:
    Advantages [T], fp32, 0 where not sampled.

  >>> mask = jnp.array([True, True, False, False, True])
  >>> rewards = place_terminal_reward(1.0, mask)
  >>> values = jnp.array([0.5, 0.6, 9.0, 9.0, 0.7])
  >>> [round(float(a), 4) for a in skip_observation_gae(rewards, values, mask, lam=7 / 9)]
  [0.3593, 0.3333, 0.0, 0.0, 0.3]
  """
  # A row that holds this one trajectory, without padding.
  action_mask = jnp.asarray(action_mask, jnp.bool_)
  chex.assert_rank(action_mask, 1)
  chex.assert_shape([rewards, values], action_mask.shape)
  full = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), action_mask.shape)
  values = jnp.asarray(values, jnp.float32)

  # A = G - V on sampled tokens.
  returns = packed_returns(
    jnp.asarray(rewards, jnp.float32),
    values,
    action_mask,
    jnp.ones(action_mask.shape, jnp.int32),
    one_minus_lam=full(1.0 - lam),
    gamma=gamma,
    bootstrap_values=full(bootstrap_value),
  )
  return jnp.where(action_mask, returns - values, 0.0)


def masked_whiten(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
  """(x - mean) / sqrt(var + 1e-8) over the True entries (population variance); masked entries are 0.

  A single entry and constant entries give 0, never NaN; a spread below 1e-4 is not blown up to full size.

  >>> x, mask = jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False])
  >>> [round(float(a), 4) for a in masked_whiten(x, mask)]
  [-1.0, 1.0, 0.0]
  """
  mask = jnp.asarray(mask, jnp.bool_)
  mean, std = masked_mean_and_std(x, mask)
  scale = jnp.where(std == 0.0, 0.0, 1.0 / jnp.hypot(std, SMALLEST_SPREAD))  # hypot: the square might overflow
  return jnp.where(mask, (jnp.asarray(x, jnp.float32) - mean) * scale, 0.0)


def whiten_advantages(
  advantages: Float[Array, "B T"], batch: TrajectoryBatch, trained: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
  """Whitens the advantages of the trained tokens, unless all their trajectories have the same return.

  Equal returns say nothing about what to do: the spread of the advantages is the critic's error alone. Whitening would
  make a full-size update out of it, and have half the tokens of a batch of failures reinforced; so they stay raw.
  """
  _, spread = masked_mean_and_std(pieces.returns(batch), trained)
  return jnp.where(spread > 0.0, masked_whiten(advantages, trained), jnp.where(trained, advantages, 0.0))


def batch_returns(
  config: AlgorithmConfig,
  batch: TrajectoryBatch,
  state_values: Float[Array, "B T"] | None,
  one_minus_lam: Float[Array, "B T"],
) -> Float[Array, "B T"]:
  """λ-returns of all sampled tokens of a batch; exactly R on each of them for γ = λ = 1 and one reward at a true end.

  Args:
    config: γ, and what follows a trajectory that was cut (`truncation`).
    batch: packed rows.
    state_values: V of the state after each token; None only where returns do not depend on it.
    one_minus_lam: 1 - λ on every token.
  """
  if state_values is None:
    state_values = jnp.zeros(batch.token_ids.shape, jnp.float32)
  values, sampled = tokens.token_values(state_values, batch), tokens.sampled_tokens(batch)
  return step_returns(config, batch, state_values, Steps(sampled, values, batch.rewards), one_minus_lam)


def step_returns(
  config: AlgorithmConfig,
  batch: TrajectoryBatch,
  state_values: Float[Array, "B T"],
  steps: Steps,
  one_minus_lam: Float[Array, "B T"],
) -> Float[Array, "B T"]:
  """λ-returns of all steps of a batch; 0 elsewhere. Arguments as in `batch_returns`."""
  # V behind the end of those trajectories that were cut.
  bootstrap = None
  if config.truncation == "bootstrap":
    bootstrap = jnp.where(batch.truncated, jax.vmap(tokens.at_end)(state_values, batch.trajectory_ids), 0.0)

  # Row by row, where a piece ends like a trajectory of its own; then on from piece to piece.
  end_values = bootstrap
  if batch.pieces is not None and bootstrap is not None:
    end_values = jnp.where(batch.pieces.ids > 0, 0.0, bootstrap)
  returns = jax.vmap(functools.partial(packed_returns, gamma=config.gamma))(
    steps.rewards,
    steps.values,
    steps.mask,
    batch.trajectory_ids,
    one_minus_lam=one_minus_lam,
    bootstrap_values=end_values,
  )
  if batch.pieces is None:
    return returns
  return pieces.join_returns(
    returns,
    steps.values,
    steps.mask,
    batch,
    one_minus_lam=one_minus_lam,
    gamma=config.gamma,
    end_values=jnp.zeros_like(returns) if bootstrap is None else bootstrap,
  )


def value_targets_need_values(config: AlgorithmConfig) -> bool:
  """False if the critic's targets are sums of rewards alone, whatever the values are (the paper's setting)."""
  return config.critic_lambda != 1.0 or config.truncation == "bootstrap"


def value_targets(
  config: AlgorithmConfig, batch: TrajectoryBatch, state_values: Float[Array, "B T"] | None
) -> Float[Array, "B T"]:
  """λ_critic-returns; exactly R on every sampled token for γ = λ_critic = 1 and a terminal reward R.

  Never from the policy's λ.
  `state_values` are those before the updates on this batch; None if not `value_targets_need_values(config)`.
  """
  one_minus_lam = jnp.full(batch.token_ids.shape, 1.0 - config.critic_lambda, jnp.float32)
  return batch_returns(config, batch, state_values, one_minus_lam)


def sao_advantages(
  config: AlgorithmConfig, batch: TrajectoryBatch, state_values: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """Skip-observation GAE with each trajectory's length-adaptive λ: A = G - V on all sampled tokens, 0 elsewhere.

  `algorithm.gae` makes the steps others than sampled tokens, and `algorithm.policy_lambda` λ another than 1 - 1/(α n).
  """
  sampled, steps = tokens.sampled_tokens(batch), td_steps(config, batch, state_values)
  if config.policy_lambda == "length_adaptive":
    one_minus_lam = one_minus_lambda(lambda_length(config, batch, steps), config.alpha)
  else:
    one_minus_lam = jnp.full(sampled.shape, 1.0 - config.policy_lambda, jnp.float32)

  if config.gae == "segments":
    return segment_advantages(config, batch, state_values, steps, one_minus_lam)
  returns = step_returns(config, batch, state_values, steps, one_minus_lam)
  return jnp.where(sampled, steps.on_tokens(returns - steps.values), 0.0)


def segment_advantages(
  config: AlgorithmConfig,
  batch: TrajectoryBatch,
  state_values: Float[Array, "B T"],
  steps: Steps,
  one_minus_lam: Float[Array, "B T"],
) -> Float[Array, "B T"]:
  """Advantages of each segment by itself, less those of early ones (CompactionRL, arXiv 2607.05378, eq. 13-15).

  A segment ends like a trajectory, with all rewards from its end on, undiscounted (and V behind the end of one that was
  cut). With the λ-returns G to there, and m sampled tokens in the segments that follow,

      A = (γλ)^m (G - V)

  so that a reward reaches a token as if the segments were one trajectory; values of later segments do not enter.
  """
  segments, mask, values = batch.segment_ids, steps.mask, steps.values
  certain = jnp.zeros_like(values)  # 1 - λ: returns are sums of rewards

  # From each token on, to the end of the trajectory: rewards, and sampled tokens.
  sums = dataclasses.replace(config, gamma=1.0)
  to_come = step_returns(sums, batch, state_values, steps, certain)
  count = Steps(mask, values, jnp.ones_like(values))
  left = step_returns(dataclasses.replace(sums, truncation="zero"), batch, state_values, count, certain)

  # Each segment as a trajectory of its own.
  last = jax.vmap(tokens.last_sampled)(mask, segments)
  returns = jax.vmap(functools.partial(packed_returns, gamma=config.gamma))(
    jnp.where(last, to_come, steps.rewards), values, mask, segments, one_minus_lam=one_minus_lam
  )

  # What follows the segment: (γλ)^m.
  own = jax.vmap(lambda mask, ids: tokens.affine_scan(tokens.ends(ids), mask, reverse=True))(mask, segments)
  discount = pieces.power((1.0 - config.gamma) + config.gamma * one_minus_lam, left - own)
  return jnp.where(mask, discount * (returns - values), 0.0)
