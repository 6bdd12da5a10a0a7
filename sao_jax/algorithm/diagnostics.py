"""Figures that a train step reports about its batch, over the trained tokens of the global batch.

NaN means "undefined" (no token to average over, returns without variance), never ±inf.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.algorithm import pieces
from sao_jax.algorithm.loss_variants import mean_log_ratios, of_trajectories, token_weights
from sao_jax.algorithm.network import Update
from sao_jax.algorithm.policy_loss import log_ratios
from sao_jax.algorithm.reductions import masked_count, masked_mean, masked_mean_and_std, masked_sum
from sao_jax.algorithm.value_loss import make_value_head
from sao_jax.config import AlgorithmConfig
from sao_jax.types import PolicyOutputs, RouterStatistics, TrajectoryBatch

# The lowest lag of each bin of the metrics by lag: first one bin a lag, then of doubling width; the last one is open.
LAG_BINS = (*range(8), *(8 << doubling for doubling in range(8)))

RATIO_PERCENTILES = {"p01": 1, "p05": 5, "p50": 50, "p95": 95, "p99": 99}


def explained_variance(
  values: Float[Array, "*tokens"], returns: Float[Array, "*tokens"], action_mask: Bool[Array, "*tokens"]
) -> Float[Array, ""]:
  """EV = 1 - Var(R - V) / Var(R); NaN where all returns are equal (to fp32 rounding) or nothing is sampled.

  >>> values, returns = jnp.array([0.25, 0.75, 0.25, 0.75]), jnp.array([0.0, 1.0, 0.0, 1.0])
  >>> round(float(explained_variance(values, returns, jnp.ones(4, bool))), 4)
  0.75
  """
  action_mask = jnp.asarray(action_mask, jnp.bool_)
  returns = jnp.asarray(returns, jnp.float32)
  _, residual = masked_mean_and_std(returns - jnp.asarray(values, jnp.float32), action_mask)
  _, spread = masked_mean_and_std(returns, action_mask)
  return jnp.where(spread > 0.0, 1.0 - jnp.square(residual / jnp.where(spread > 0.0, spread, 1.0)), jnp.nan)


def effective_sample_size(weights: Float[Array, "*tokens"], action_mask: Bool[Array, "*tokens"]) -> Float[Array, ""]:
  """ESS/n = (Σw)² / (n Σw²) in [0, 1], n counting rejected tokens (w = 0) too; NaN if nothing is sampled.

  Everything rejected gives 0.
  """
  weights = jnp.where(action_mask, jnp.asarray(weights, jnp.float32), 0.0)
  scaled = weights / jnp.maximum(jnp.max(weights, initial=0.0), jnp.finfo(jnp.float32).tiny)
  squares = jnp.sum(jnp.square(scaled))
  return jnp.square(jnp.sum(scaled)) / (masked_count(action_mask) * jnp.where(squares > 0.0, squares, 1.0))


def _order_key(x: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
  """Maps the bits of fp32 numbers to integers in the same order; its own inverse."""
  return jnp.where(x < 0, x ^ jnp.int32(0x7FFFFFFF), x)


def ratio_quantiles(
  log_ratio: Float[Array, "*tokens"], action_mask: Bool[Array, "*tokens"]
) -> dict[str, Float[Array, ""]]:
  """Quantiles of the importance ratio ρ, {"ratio_p01": ..., ...}: the smallest ρ that at least that share is <= to.

  By bisection over the bits, exact in 32 rounds of counting: a sort would gather the tokens of the whole mesh on every
  device. Saturates at exp(±80), which fp32 can hold; NaN if nothing is sampled.
  """
  keys = _order_key(jax.lax.bitcast_convert_type(jnp.asarray(log_ratio, jnp.float32), jnp.int32))
  count = jnp.sum(action_mask, dtype=jnp.int32)
  percents = jnp.array(list(RATIO_PERCENTILES.values()), jnp.int32)
  # ceil(percent * count / 100) without overflow, and without fp32 missing the rank for some counts.
  ranks = count // 100 * percents + (count % 100 * percents + 99) // 100

  def halve(_: Int[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
    low, high = bounds
    middle = (low & high) + ((low ^ high) >> 1)
    at_most = jax.vmap(lambda key: jnp.sum(action_mask & (keys <= key), dtype=jnp.int32))(middle)
    return jnp.where(at_most >= ranks, low, middle + 1), jnp.where(at_most >= ranks, middle, high)

  limits = jnp.iinfo(jnp.int32)
  bounds = (jnp.full(percents.shape, limits.min, jnp.int32), jnp.full(percents.shape, limits.max, jnp.int32))
  found, _ = jax.lax.fori_loop(0, 32, halve, bounds)
  quantiles = jax.lax.bitcast_convert_type(_order_key(found), jnp.float32)
  ratios = jnp.where(count > 0, jnp.exp(jnp.clip(quantiles, -80.0, 80.0)), jnp.nan)
  return {f"ratio_{name}": ratios[i] for i, name in enumerate(RATIO_PERCENTILES)}


def token_lags(
  policy_version: Int[Array, ""], token_versions: Int[Array, "*tokens"], action_mask: Bool[Array, "*tokens"]
) -> Int[Array, "*tokens"]:
  """Policy updates between sampling and training of each token; 0 where not sampled. Never clamped: < 0 is a bug."""
  return jnp.where(action_mask, policy_version - token_versions, 0)


def _by_lag(lags: Int[Array, "*tokens"], action_mask: Bool[Array, "*tokens"]) -> Bool[Array, "L *tokens"]:
  """One-hot of the bins that the lags fall into, in front; a negative lag is in none."""
  each = lambda bounds: jnp.array(bounds, jnp.int32).reshape(-1, *(1,) * lags.ndim)
  highest = (*(lowest - 1 for lowest in LAG_BINS[1:]), jnp.iinfo(jnp.int32).max)
  return (lags >= each(LAG_BINS)) & (lags <= each(highest)) & action_mask


def lag_metrics(
  lags: Int[Array, "*tokens"], action_mask: Bool[Array, "*tokens"], *, max_lag: int = -1
) -> dict[str, Array]:
  """Histogram of the lags in tokens, {"lag_histogram": one number per bin of `LAG_BINS`, ...}.

  lag_histogram.sum() + lag_negative = number of sampled tokens. Those above `max_lag`, the bound that the rollout side
  must keep, count as "lag_overflow" too; a negative `max_lag` is no bound.
  """
  lowest = jnp.iinfo(jnp.int32).min
  largest = jnp.max(jnp.where(action_mask, lags, lowest), initial=lowest)
  return {
    "lag_histogram": jnp.sum(_by_lag(lags, action_mask), axis=tuple(range(1, lags.ndim + 1)), dtype=jnp.float32),
    "lag_negative": masked_count(action_mask & (lags < 0)),
    "lag_overflow": masked_count(action_mask & (max_lag >= 0) & (lags > max_lag)),
    "lag_mean": masked_mean(lags, action_mask),
    "lag_max": jnp.where(jnp.any(action_mask), largest.astype(jnp.float32), jnp.nan),
  }


def mean_by_lag(
  x: Float[Array, "*tokens"], lags: Int[Array, "*tokens"], action_mask: Bool[Array, "*tokens"]
) -> Float[Array, "L"]:
  """Mean of `x` over the sampled tokens of each bin of `LAG_BINS`; NaN in bins without a token."""
  return jax.vmap(lambda mask: masked_sum(x, mask) / masked_count(mask))(_by_lag(lags, action_mask))


def batch_metrics(
  batch: TrajectoryBatch, sampled: Bool[Array, "B T"], trained: Bool[Array, "B T"]
) -> dict[str, Float[Array, ""]]:
  """Counts and the mean reward per trajectory (truncated ones included); NaN if the batch has none. fp32."""
  first = pieces.first_tokens(batch)
  trajectories = masked_count(first)
  return {
    "num_tokens": masked_count(batch.segment_ids > 0),
    "num_sampled_tokens": masked_count(sampled),
    "num_trained_tokens": masked_count(trained),
    "num_trajectories": trajectories,
    "num_truncated": masked_count(first & batch.truncated),
    "num_untrained": masked_count(first & (pieces.count_per_trajectory(batch, trained) == 0.0)),
    "reward_mean": masked_sum(batch.rewards, batch.action_mask) / trajectories,
  }


def critic_metrics(
  config: AlgorithmConfig,
  updates: Update,
  values: Float[Array, "B T"],
  targets: Float[Array, "B T"],
  trained: Bool[Array, "B T"],
) -> dict[str, Float[Array, ""]]:
  """Loss of the first and last of the stacked updates, mean gradient norm, skipped updates; EV of `values` before them.

  "value_targets_clipped" is the fraction of targets outside the range that the value head can represent.
  """
  return {
    "value_loss_first": updates.loss[0],
    "value_loss_last": updates.loss[-1],
    "critic_grad_norm": jnp.mean(updates.grad_norm),
    "critic_updates_skipped": masked_count(~updates.applied),
    "explained_variance": explained_variance(values, targets, trained),
    "value_targets_clipped": masked_mean(make_value_head(config).clips(targets), trained),
  }


def policy_metrics(
  config: AlgorithmConfig,
  update: Update,
  outputs: PolicyOutputs,
  batch: TrajectoryBatch,
  trained: Bool[Array, "B T"],
  advantages: Float[Array, "B T"],
  used_advantages: Float[Array, "B T"],
  lags: Int[Array, "B T"],
) -> dict[str, Array]:
  """Ratios, rejections, entropy and routers of the policy before its update; `advantages` are those before whitening.

  `used_advantages` are those that entered the loss: with some losses their signs decide which tokens are rejected.
  """
  # The ratios that the loss used: the policy before its update against the sampler.
  log_ratio = log_ratios(outputs.logprobs, batch.behavior_logprobs, trained)
  decisive = mean_log_ratios(outputs.logprobs, batch, trained) if of_trajectories(config) else log_ratio
  weights, low, high = token_weights(config, decisive, used_advantages, trained)
  delta = jnp.abs(log_ratio)
  mean, std = masked_mean_and_std(advantages, trained)

  # Fractions and means are over the trained tokens, rejected ones included.
  return {
    "policy_loss": update.loss,
    "policy_grad_norm": update.grad_norm,
    "policy_updates_skipped": masked_count(~update.applied),
    "advantage_mean": mean,
    "advantage_std": std,
    "entropy": masked_mean(outputs.entropy, trained),
    "rejected_low": masked_mean(low, trained),
    "rejected_high": masked_mean(high, trained),
    "effective_sample_size": effective_sample_size(weights, trained),
    "delta_logprob": masked_mean(delta, trained),
    "delta_logprob_by_lag": mean_by_lag(delta, lags, trained),
    **ratio_quantiles(log_ratio, trained),
    **(router_metrics(outputs.router) if outputs.router else {}),
  }


def router_metrics(router: RouterStatistics) -> dict[str, Float[Array, ""]]:
  """Entropy and load of the routers, and shares of replayed experts; NaN where there is nothing to average over.

  "router_entropy": mean over tokens and layers, in nats, at most log E. "router_load_max": tokens of the busiest expert
  of all layers, as a multiple of an even share; 1 is even, E / k the worst. "router_idle_experts": share of experts
  that no token used. "router_dropped": choices that no expert computed, which is 0 in a dropless layer.
  "router_replayed": share of choices that came from the sampler; "router_agreement": share of those that this router
  makes too.
  """
  load = jnp.sum(router.load, axis=0)  # [L, E]
  num_choices, num_replayed = jnp.sum(load), jnp.sum(router.replayed)
  even = jnp.mean(load, axis=-1, keepdims=True)
  return {
    "router_entropy": jnp.sum(router.entropy) / (jnp.sum(router.tokens) * load.shape[0]),
    "router_load_max": jnp.max(load / even),
    "router_idle_experts": jnp.where(num_choices > 0.0, jnp.mean(load == 0.0, dtype=jnp.float32), jnp.nan),
    "router_dropped": jnp.sum(router.dropped),
    "router_replayed": num_replayed / num_choices,
    "router_agreement": jnp.sum(router.agreeing) / num_replayed,
  }
