"""The critic's part of a train step: K updates on one batch, frozen leaves left alone (arXiv 2607.07508)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from sao_jax.algorithm import targets
from sao_jax.algorithm.diagnostics import explained_variance
from sao_jax.algorithm.frozen import replace_leaves, trainable_leaves
from sao_jax.algorithm.reductions import masked_count, masked_mean
from sao_jax.algorithm.updates import Leaves, Update, accumulate_gradients, guarded_update, map_micro_batches
from sao_jax.algorithm.value_loss import make_value_head
from sao_jax.config import AlgorithmConfig
from sao_jax.types import NetworkState, PyTree, TrajectoryBatch

ValueApply = Callable[[PyTree, TrajectoryBatch], Float[Array, "B T O"]]


class CriticFit(NamedTuple):
  """What the K updates leave behind.

  Attributes:
    values_before: V of the state after each token [B, T], read before the first update.
    targets: value targets [B, T], the same for all updates.
    updates: the K updates, stacked.
  """

  values_before: Float[Array, "B T"]
  targets: Float[Array, "B T"]
  updates: Update


def read_values(
  config: AlgorithmConfig, value_apply: ValueApply, params: PyTree, batch: TrajectoryBatch
) -> Float[Array, "B T"]:
  """V of the state after each token (state-aligned), without gradients."""
  head = make_value_head(config)
  return map_micro_batches(lambda rows: head.values(value_apply(params, rows)), batch, config.micro_batches)


def fit_critic(
  config: AlgorithmConfig,
  value_apply: ValueApply,
  optimizer: optax.GradientTransformation,
  frozen_paths: frozenset[str],
  critic: NetworkState,
  batch: TrajectoryBatch,
  mask: Bool[Array, "B T"],
) -> tuple[NetworkState, CriticFit]:
  """K = `config.value_updates` gradient steps on the batch.

  The values before the updates come out of the first step's own forward pass, unless something must know them earlier.
  """
  head = make_value_head(config)
  num_tokens = masked_count(mask)
  values = None
  if targets.targets_need_values(config) or config.value_clip > 0.0:
    values = read_values(config, value_apply, critic.params, batch)
  value_targets = targets.value_targets(config, batch, values)
  old_values = None if values is None else targets.token_values(values, batch)

  def loss_fn(leaves: Leaves, inputs: PyTree) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
    rows, rows_mask, rows_targets, rows_old_values = inputs
    outputs = value_apply(replace_leaves(critic.params, leaves), rows)
    loss, _ = head.loss(
      targets.token_outputs(outputs, rows), rows_targets, rows_mask, denominator=num_tokens, old_values=rows_old_values
    )
    return loss, head.values(outputs)

  def step(critic: NetworkState, _: None) -> tuple[NetworkState, tuple[Update, Float[Array, "B T"]]]:
    leaves = trainable_leaves(critic.params, frozen_paths)
    inputs = (batch, mask, value_targets, old_values)
    loss, values, grads = accumulate_gradients(loss_fn, leaves, inputs, config.micro_batches)
    critic, update = guarded_update(critic, leaves, grads, optimizer, loss, num_tokens > 0.0)
    return critic, (update, values)

  critic, (updates, all_values) = jax.lax.scan(step, critic, None, length=config.value_updates)
  return critic, CriticFit(all_values[0], value_targets, updates)


def critic_metrics(
  config: AlgorithmConfig, fit: CriticFit, batch: TrajectoryBatch, mask: Bool[Array, "B T"]
) -> dict[str, Float[Array, ""]]:
  """Loss of the first and last update, mean gradient norm, skipped updates; EV of the values before the updates.

  "value_targets_clipped" is the fraction of targets outside the range that the value head can represent.
  """
  values = targets.token_values(fit.values_before, batch)
  return {
    "value_loss_first": fit.updates.loss[0],
    "value_loss_last": fit.updates.loss[-1],
    "critic_grad_norm": jnp.mean(fit.updates.grad_norm),
    "critic_updates_skipped": jnp.sum(~fit.updates.applied, dtype=jnp.float32),
    "explained_variance": explained_variance(values, fit.targets, mask),
    "value_targets_clipped": masked_mean(make_value_head(config).clips(fit.targets), mask),
  }
