"""Restoring the state of a learner, also from checkpoints that an older version saved."""

from __future__ import annotations

from collections.abc import Callable

import jax
from absl import logging

from sao_jax.algorithm.masters import add_masters, without_masters
from sao_jax.checkpoints.checkpointer import Checkpointer, Restored
from sao_jax.types import NetworkState, PyTree


def restore_state(checkpointer: Checkpointer, abstract: PyTree) -> Restored | None:
  """Restores the newest readable checkpoint; None without one.

  A checkpoint of 0.1.0 in bf16 has no fp32 masters: they begin as its parameters are, and the log says so.

  Args:
    checkpointer: a folder of checkpoints.
    abstract: the state's structure, a `TrainState` or a `NetworkState`, as `Checkpointer.restore` takes it.
  """
  structure, older = jax.tree.structure(abstract), _map_networks(without_masters, abstract)
  restored = checkpointer.restore(abstract, older=None if jax.tree.structure(older) == structure else older)
  if restored is None or jax.tree.structure(restored.state) == structure:
    return restored
  if not any(leaf.sharding.addressable_devices for leaf in jax.tree.leaves(abstract)):
    return restored._replace(state=abstract)  # of a process that does not learn

  logging.warning(
    "The checkpoint of step %d was saved without fp32 masters, by an older version: they begin as its parameters are.",
    restored.step,
  )
  with_masters = _map_networks(add_masters, restored.state, abstract)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
  return restored._replace(state=jax.device_put(with_masters, shardings))


def _map_networks(function: Callable[..., NetworkState], state: PyTree, *others: PyTree) -> PyTree:
  """Applies `function` to every network of a state, or to the state itself if it is one."""
  is_network = lambda node: isinstance(node, NetworkState)
  apply = lambda node, *rest: function(node, *rest) if is_network(node) else node
  return jax.tree.map(apply, state, *others, is_leaf=is_network)
