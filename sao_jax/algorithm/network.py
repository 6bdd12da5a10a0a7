"""One network in training: what never changes about it, its trainable leaves, and one guarded gradient step.

Frozen leaves are an explicit list of names; nothing matches by pattern. Gradients and optimiser states are flat dicts
{"moe_layers/moe/up": leaf, ...} of the trainable leaves only, so a frozen leaf has no gradient, no weight decay and no
optimiser state, and stays the same bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from sao_jax.errors import ConfigError
from sao_jax.types import NetworkState, PyTree, TrajectoryBatch

Leaves = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Network:
  """The static half of a policy or a critic; `NetworkState` is the other half.

  Attributes:
    specs: the declared parameters, a tree.
    apply: `(params, batch) -> outputs`: `PolicyOutputs` of a policy, state-aligned [B, T, O] in fp32 of a critic.
    optimizer: the transformation of the trainable leaves.
    frozen: names of the leaves that stay fixed.
    after_update: `(params, outputs) -> params`, applied behind each update that was not skipped, to frozen leaves too;
      `outputs` are those of the batch before the update. None: nothing is.
    join: `(params, policy's params) -> params` of `apply`, for a network that reads frozen leaves of the policy, which
      `specs` does not declare again. None: its own are all.
  """

  specs: PyTree
  apply: Callable[[PyTree, TrajectoryBatch], Any]
  optimizer: optax.GradientTransformation
  frozen: frozenset[str] = frozenset()
  after_update: Callable[[PyTree, Any], PyTree] | None = None
  join: Callable[[PyTree, PyTree], PyTree] | None = None

  def whole(self, params: PyTree, of_policy: PyTree) -> PyTree:
    """The parameters that `apply` takes: its own, and what it shares with the policy. Nothing is copied."""
    return params if self.join is None else self.join(params, of_policy)

  def beside(self, of_policy: PyTree) -> Network:
    """The same network, whose `apply` takes its own parameters alone and finds the shared ones in the policy's."""
    if self.join is None:
      return self
    apply = lambda params, rows: self.apply(self.join(params, of_policy), rows)
    return dataclasses.replace(self, apply=apply, join=None)

  def start(self, params: PyTree) -> NetworkState:
    """The state before the first update."""
    leaves = trainable_leaves(params, self.frozen)
    return NetworkState(params, self.optimizer.init(leaves), jnp.zeros((), jnp.int32))


class Update(NamedTuple):
  """The result of one update.

  Attributes:
    loss: before the update.
    grad_norm: global norm over the trainable leaves, before clipping.
    applied: False if the guard skipped it.
  """

  loss: Float[Array, ""]
  grad_norm: Float[Array, ""]
  applied: Bool[Array, ""]


def leaf_name(path: tuple) -> str:
  """The name of a leaf: its dict keys joined by "/"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def trainable_leaves(params: PyTree, frozen: frozenset[str] = frozenset()) -> Leaves:
  """The leaves that train, by name. ConfigError if a name to freeze is not in the tree or nothing is left to train."""
  leaves = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
  unknown = sorted(frozen - leaves.keys())
  if unknown:
    raise ConfigError(
      "frozen",
      f"{', '.join(unknown)}: no such parameters.",
      f"Name leaves of the tree, which has {', '.join(sorted(leaves))}.",
    )
  if not leaves.keys() - frozen:
    raise ConfigError("frozen", "Every parameter is frozen.", "Leave at least one to train.")
  return {name: leaf for name, leaf in leaves.items() if name not in frozen}


def replace_leaves(params: PyTree, leaves: Mapping[str, jax.Array]) -> PyTree:
  """The tree with the named leaves replaced; the others are taken from `params` as they are."""
  return jax.tree_util.tree_map_with_path(lambda path, leaf: leaves.get(leaf_name(path), leaf), params)


def gradient_step(
  network: Network,
  state: NetworkState,
  loss_fn: Callable[[PyTree, PyTree], tuple[Float[Array, ""], PyTree]],
  inputs: PyTree,
  *,
  micro_batches: int = 1,
  allowed: Callable[[PyTree], Bool[Array, ""]] = lambda outputs: jnp.ones((), jnp.bool_),
) -> tuple[NetworkState, Update, PyTree]:
  """One update of the trainable leaves; a loss or gradient that is not finite skips it.

  Args:
    network: the static half.
    state: before the update.
    loss_fn: `(params, inputs) -> (loss, outputs)`, where the loss is a sum over the rows of `inputs` already divided by
      the *global* denominator. So the parts add up to the loss of the whole batch, and nothing is divided again.
    inputs: arrays [B, ...], of which `loss_fn` gets one micro-batch at a time.
    micro_batches: static.
    allowed: a test of the outputs of all rows; False skips the update too.

  Returns:
    The state after it (the same bit for bit if it was skipped), what happened, and the outputs of all rows.
  """
  leaves = trainable_leaves(state.params, network.frozen)
  of_leaves = lambda leaves, rows: loss_fn(replace_leaves(state.params, leaves), rows)
  loss, outputs, grads = accumulate_gradients(of_leaves, leaves, inputs, micro_batches)
  state, update = guarded_update(state, leaves, grads, network.optimizer, loss, allowed(outputs))

  if network.after_update is not None:
    params = network.after_update(state.params, outputs)
    keep = lambda new, old: jnp.where(update.applied, new, old)
    state = state.replace(params=jax.tree.map(keep, params, state.params))
  return state, update, outputs


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
  """Loss, per-row outputs and gradients of a whole batch, one micro-batch at a time; arguments as in `gradient_step`.

  `loss_fn` takes the trainable leaves, by which it is differentiated.
  """
  grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
  if micro_batches == 1:
    (loss, outputs), grads = grad_fn(leaves, inputs)
    return loss, outputs, grads

  # Sums in fp32, whatever the parameters are stored in.
  def body(sums: tuple[jax.Array, Leaves], part: PyTree) -> tuple[tuple[jax.Array, Leaves], PyTree]:
    (loss, outputs), grads = grad_fn(leaves, part)
    return jax.tree.map(lambda total, x: total + x.astype(jnp.float32), sums, (loss, grads)), outputs

  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), leaves)
  start = (jnp.zeros((), jnp.float32), zeros)
  (loss, grads), outputs = jax.lax.scan(body, start, split_rows(inputs, micro_batches))
  return loss, join_rows(outputs), jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, leaves)


@jax.named_scope("optimizer")
def guarded_update(
  state: NetworkState,
  leaves: Leaves,
  grads: Leaves,
  optimizer: optax.GradientTransformation,
  loss: Float[Array, ""],
  allowed: Bool[Array, ""],
) -> tuple[NetworkState, Update]:
  """Applies the gradients, or leaves parameters, optimiser state and step as they are, bit for bit.

  Args:
    state: the network before the update.
    leaves: its trainable leaves.
    grads: their gradients.
    optimizer: the transformation that `state.opt_state` belongs to.
    loss: before the update.
    allowed: False skips the update, like a non-finite loss or gradient norm does.
  """
  grad_norm = optax.tree.norm(jax.tree.map(lambda grad: grad.astype(jnp.float32), grads))
  applied = allowed & jnp.isfinite(loss) & jnp.isfinite(grad_norm)
  updates, opt_state = optimizer.update(grads, state.opt_state, leaves)

  keep = lambda new, old: jnp.where(applied, new, old)
  new = NetworkState(
    params=replace_leaves(state.params, jax.tree.map(keep, optax.apply_updates(leaves, updates), leaves)),
    opt_state=jax.tree.map(keep, opt_state, state.opt_state),
    step=state.step + applied.astype(jnp.int32),
  )
  return new, Update(loss, grad_norm, applied)
