"""fp32 masters: the optimiser's own copy of the parameters that are stored in fewer bits.

bf16 keeps 8 bits of a number: an update below 1/512 of a parameter rounds away, and at the learning rates of RL nearly
all are. So the optimiser adds its updates to fp32 masters, and the parameters are these masters, rounded: mixed
precision (arXiv 1710.03740). Masters are a part of the optimiser's state, saved and sharded with its moments.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from sao_jax.algorithm.network import Leaves, leaf_name, trainable_leaves
from sao_jax.types import NetworkState, PyTree


class Masters(NamedTuple):
  """The state of an optimiser with masters.

  Attributes:
    masters: fp32 copies of the leaves that are stored in fewer bits, by name.
    inner: state of the optimiser itself, whose moments are fp32 too.
  """

  masters: Leaves
  inner: PyTree


def with_masters(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
  """The optimiser with masters of those leaves of a flat dict that are not fp32; without any it stays what it is.

  >>> optimizer = with_masters(optax.sgd(1e-4))
  >>> leaves = {"w": jnp.ones((), jnp.bfloat16)}
  >>> state = optimizer.init(leaves)
  >>> for _ in range(30):
  ...   updates, state = optimizer.update(leaves, state, leaves)
  ...   leaves = optax.apply_updates(leaves, updates)
  >>> f"{float(state.masters['w']):.4f}", float(leaves["w"]), str(leaves["w"].dtype)
  ('0.9970', 0.99609375, 'bfloat16')
  """

  def init(leaves: Leaves) -> PyTree:
    masters = masters_of(leaves)
    return Masters(masters, optimizer.init(leaves | masters)) if masters else optimizer.init(leaves)

  def update(grads: Leaves, state: PyTree, leaves: Leaves) -> tuple[Leaves, PyTree]:
    if not isinstance(state, Masters):
      return optimizer.update(grads, state, leaves)

    # The whole update in fp32.
    full = leaves | state.masters
    grads = {name: grad.astype(full[name].dtype) for name, grad in grads.items()}
    updates, inner = optimizer.update(grads, state.inner, full)
    moved = optax.apply_updates(full, updates)
    masters = {name: moved[name] for name in state.masters}

    # What is added to a parameter makes it the rounded master: the sum is formed in fp32, and rounded once.
    lacking = {name: master - leaves[name].astype(jnp.float32) for name, master in masters.items()}
    return updates | lacking, Masters(masters, inner)

  return optax.GradientTransformation(init, update)


def masters_of(leaves: Leaves) -> Leaves:
  """fp32 copies of the leaves that are stored in fewer bits."""
  return {name: leaf.astype(jnp.float32) for name, leaf in leaves.items() if leaf.dtype != jnp.float32}


def without_masters(abstract: NetworkState) -> NetworkState:
  """The abstract state as 0.1.0 saved it: no masters, and every moment in the dtype of its parameter."""
  if not isinstance(abstract.opt_state, Masters):
    return abstract
  stored = {leaf_name(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(abstract.params)}

  # A moment stands in a dict under the name of its parameter.
  def narrow(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    dtype = stored.get(getattr(path[-1], "key", None), leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

  return abstract.replace(opt_state=jax.tree_util.tree_map_with_path(narrow, abstract.opt_state.inner))


def add_masters(state: NetworkState, abstract: NetworkState) -> NetworkState:
  """Turns a state that was saved without masters into one like `abstract`: masters begin as the parameters are."""
  if not isinstance(abstract.opt_state, Masters):
    return state
  inner = jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), state.opt_state, abstract.opt_state.inner)
  leaves = trainable_leaves(state.params)
  masters = {name: leaves[name].astype(jnp.float32) for name in abstract.opt_state.masters}
  return state.replace(opt_state=Masters(masters, inner))
