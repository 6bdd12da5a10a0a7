"""The policy's part of a train step: one update from given advantages, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from sao_jax.algorithm import diagnostics
from sao_jax.algorithm.frozen import replace_leaves, trainable_leaves
from sao_jax.algorithm.policy_loss import dis_policy_loss, dis_weights, log_ratios
from sao_jax.algorithm.reductions import masked_count, masked_mean
from sao_jax.algorithm.router_metrics import router_metrics
from sao_jax.algorithm.updates import Leaves, Update, accumulate_gradients, guarded_update
from sao_jax.config import AlgorithmConfig
from sao_jax.types import NetworkState, PolicyOutputs, PyTree, TrajectoryBatch

PolicyApply = Callable[[PyTree, TrajectoryBatch], PolicyOutputs]


class PolicyFit(NamedTuple):
  """The update, and the policy's outputs before it."""

  outputs: PolicyOutputs
  update: Update


def fit_policy(
  config: AlgorithmConfig,
  policy_apply: PolicyApply,
  optimizer: optax.GradientTransformation,
  frozen_paths: frozenset[str],
  policy: NetworkState,
  batch: TrajectoryBatch,
  mask: Bool[Array, "B T"],
  advantages: Float[Array, "B T"],
) -> tuple[NetworkState, PolicyFit]:
  """One DIS gradient step. A NaN or infinite log-ratio of a trained token skips it, like a non-finite gradient."""
  num_tokens = masked_count(mask)
  leaves = trainable_leaves(policy.params, frozen_paths)

  def loss_fn(leaves: Leaves, inputs: PyTree) -> tuple[Float[Array, ""], PolicyOutputs]:
    rows, rows_mask, rows_advantages = inputs
    outputs = policy_apply(replace_leaves(policy.params, leaves), rows)
    loss, _ = dis_policy_loss(
      outputs.logprobs,
      rows.behavior_logprobs,
      rows_advantages,
      rows_mask,
      epsilon_low=config.epsilon_low,
      epsilon_high=config.epsilon_high,
      denominator=num_tokens,
    )
    return loss, outputs

  inputs = (batch, mask, jax.lax.stop_gradient(advantages))
  loss, outputs, grads = accumulate_gradients(loss_fn, leaves, inputs, config.micro_batches)
  allowed = (num_tokens > 0.0) & jnp.all(jnp.isfinite(log_ratios(outputs.logprobs, batch.behavior_logprobs, mask)))
  policy, update = guarded_update(policy, leaves, grads, optimizer, loss, allowed)
  return policy, PolicyFit(outputs, update)


def policy_metrics(
  config: AlgorithmConfig,
  fit: PolicyFit,
  batch: TrajectoryBatch,
  mask: Bool[Array, "B T"],
  lags: Int[Array, "B T"],
  max_lag: int,
) -> dict[str, Array]:
  """Ratio, rejection, entropy and router figures of the policy before its update; see `diagnostics`."""
  log_ratio = log_ratios(fit.outputs.logprobs, batch.behavior_logprobs, mask)
  weights, low, high = dis_weights(log_ratio, mask, epsilon_low=config.epsilon_low, epsilon_high=config.epsilon_high)
  delta = jnp.abs(log_ratio)
  return {
    "policy_loss": fit.update.loss,
    "policy_grad_norm": fit.update.grad_norm,
    "policy_updates_skipped": (~fit.update.applied).astype(jnp.float32),
    "entropy": masked_mean(fit.outputs.entropy, mask),
    "rejected_low": masked_mean(low, mask),
    "rejected_high": masked_mean(high, mask),
    "effective_sample_size": diagnostics.effective_sample_size(weights, mask),
    "delta_logprob": masked_mean(delta, mask),
    "delta_logprob_by_lag": diagnostics.mean_by_lag(delta, lags, mask, max_lag=max_lag),
    **diagnostics.ratio_quantiles(log_ratio, mask),
    **(router_metrics(fit.outputs.router) if fit.outputs.router else {}),
  }
