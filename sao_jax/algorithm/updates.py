"""One gradient update of one network: micro-batches, accumulation, and the guard against non-finite gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from sao_jax.algorithm.frozen import replace_leaves
from sao_jax.errors import ConfigError
from sao_jax.types import NetworkState, PyTree

Leaves = dict[str, jax.Array]


class Update(NamedTuple):
  """What happened in one update.

  Attributes:
    loss: before the update.
    grad_norm: global norm over the trainable leaves, before clipping.
    applied: False if the guard skipped it.
  """

  loss: Float[Array, ""]
  grad_norm: Float[Array, ""]
  applied: Bool[Array, ""]


def split_rows(tree: PyTree, micro_batches: int) -> PyTree:
  """[B, ...] -> [micro_batches, B / micro_batches, ...]; row r goes to micro-batch r % micro_batches.

  Strided, so that with rows sharded in contiguous blocks every device holds its share of each micro-batch and no row
  moves.
  """

  def split(x: jax.Array) -> jax.Array:
    if x.shape[0] % micro_batches:
      raise ConfigError(
        "algorithm.micro_batches",
        f"{micro_batches} micro-batches do not divide a batch of {x.shape[0]} rows.",
        "Choose a divisor of every entry of rollout.row_counts.",
      )
    return jnp.moveaxis(x.reshape(x.shape[0] // micro_batches, micro_batches, *x.shape[1:]), 1, 0)

  return jax.tree.map(split, tree)


def join_rows(tree: PyTree) -> PyTree:
  """Inverse of `split_rows`."""
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), tree)


def map_micro_batches(fn: Callable[[PyTree], PyTree], inputs: PyTree, micro_batches: int) -> PyTree:
  """`fn` of rows [B, ...], computed one micro-batch at a time."""
  if micro_batches == 1:
    return fn(inputs)
  return join_rows(jax.lax.map(fn, split_rows(inputs, micro_batches)))


def accumulate_gradients(
  loss_fn: Callable[[Leaves, PyTree], tuple[Float[Array, ""], PyTree]],
  leaves: Leaves,
  inputs: PyTree,
  micro_batches: int,
) -> tuple[Float[Array, ""], PyTree, Leaves]:
  """Loss, per-row outputs and gradients of a whole batch, one micro-batch at a time.

  Args:
    loss_fn: `(leaves, inputs) -> (loss, outputs)`, where the loss is a sum over the rows of `inputs` already divided by
      the *global* denominator. So the parts add up to the loss of the whole batch, and nothing is divided again.
    leaves: what to differentiate by.
    inputs: arrays [B, ...].
    micro_batches: static.
  """
  grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
  if micro_batches == 1:
    (loss, outputs), grads = grad_fn(leaves, inputs)
    return loss, outputs, grads

  def body(sums: tuple[jax.Array, Leaves], part: PyTree) -> tuple[tuple[jax.Array, Leaves], PyTree]:
    (loss, outputs), grads = grad_fn(leaves, part)
    return jax.tree.map(lambda total, x: total + x.astype(jnp.float32), sums, (loss, grads)), outputs

  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), leaves)
  start = (jnp.zeros((), jnp.float32), zeros)
  (loss, grads), outputs = jax.lax.scan(body, start, split_rows(inputs, micro_batches))
  return loss, join_rows(outputs), jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, leaves)


def guarded_update(
  network: NetworkState,
  leaves: Leaves,
  grads: Leaves,
  optimizer: optax.GradientTransformation,
  loss: Float[Array, ""],
  allowed: Bool[Array, ""],
) -> tuple[NetworkState, Update]:
  """Applies the gradients, or leaves parameters, optimiser state and step as they are, bit for bit.

  Args:
    network: the network before the update.
    leaves: its trainable leaves.
    grads: their gradients.
    optimizer: the transformation whose state `network.opt_state` is.
    loss: of this update.
    allowed: False skips the update, like a non-finite loss or gradient norm does.
  """
  grad_norm = optax.tree.norm(grads).astype(jnp.float32)
  applied = allowed & jnp.isfinite(loss) & jnp.isfinite(grad_norm)
  updates, opt_state = optimizer.update(grads, network.opt_state, leaves)
  keep = lambda new, old: jnp.where(applied, new, old)
  new = NetworkState(
    params=replace_leaves(network.params, jax.tree.map(keep, optax.apply_updates(leaves, updates), leaves)),
    opt_state=jax.tree.map(keep, opt_state, network.opt_state),
    step=network.step + applied.astype(jnp.int32),
  )
  return new, Update(loss, grad_norm, applied)
