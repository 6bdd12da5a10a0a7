"""Publishing: a copy of the training parameters for the sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding

from sao_jax.parallel.params import Params
from sao_jax.parallel.publish_groups import make_group_publish

Prepare = Callable[[Params], Params]


def make_publish(
  target_shardings: Any | None,
  dtype: Any | None = None,
  *,
  prepare: Prepare = lambda params: params,
  groups: Sequence[Mesh] = (),
  split: Any | None = None,
  shapes: Params | None = None,
) -> Callable[[Params | None], Params | None]:
  """Returns `publish(params)`, a copy of `params` where and how the sampler wants it.

  The copy never shares a buffer with `params`: the train step donates that tree, and a sampler that held on to a part
  of it would read freed memory. Floating leaves are cast to `dtype` before they travel. The way depends on the devices:

  * the sampler's are the learner's: one program writes the copy in the sampler's layout;
  * they are others of this process: one program casts, then the copy travels and its origin is freed;
  * some belong to other processes: as `publish_groups` says. All processes call `publish` together.

  Args:
    target_shardings: a sharding, or a tree of shardings, of the sampler's devices; None leaves the copy in place.
    dtype: the dtype of the copy: one for all floating leaves, or a tree with one for each; None keeps the dtypes.
    prepare: maps the training tree to the tree that is copied, for example merges LoRA.
    groups: where parameters live on devices of several processes, the meshes that sample, of all processes. The target
      shardings are on one of them, and their specs hold on all.
    split: with groups, the tree of `NamedSharding`s that the cast copy has on the learner's devices before it travels;
      None leaves that to the compiler.
    shapes: shapes and dtypes of the copy; needed by processes that sample only, which call `publish(None)`.
  """
  copy = cast_copy(dtype, prepare)
  copy_here = jax.jit(copy, out_shardings=split)
  if target_shardings is None:
    return copy_here

  targets = {devices_of(sharding) for sharding in jax.tree.leaves(target_shardings)}
  copy_to_target = jax.jit(copy, out_shardings=target_shardings)
  to_groups = make_group_publish(target_shardings, groups, shapes) if groups else None

  def publish(params: Params | None) -> Params | None:
    if to_groups is not None:
      return to_groups(None if params is None else copy_here(params))
    if {devices_of(leaf.sharding) for leaf in jax.tree.leaves(params)} == targets:
      return copy_to_target(params)
    return jax.device_put(copy_here(params), target_shardings)

  return publish


def cast_copy(dtype: Any | None, prepare: Prepare = lambda params: params) -> Prepare:
  """Returns the traceable part of a publish: prepared parameters, with floating leaves in `dtype`."""

  def copy(leaf: jax.Array, dtype: Any | None) -> jax.Array:
    cast = dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
    return jnp.array(leaf, dtype=dtype if cast else leaf.dtype, copy=True)

  def copy_tree(params: Params) -> Params:
    params = prepare(params)
    if isinstance(dtype, dict):
      return jax.tree.map(copy, params, dtype)
    return jax.tree.map(lambda leaf: copy(leaf, dtype), params)

  return copy_tree


def devices_of(sharding: Sharding) -> tuple[jax.Device, ...]:
  """The devices of a sharding in their order, which all arrays of a program must have in common."""
  if isinstance(sharding, NamedSharding):
    return tuple(sharding.mesh.devices.flat)
  return tuple(sorted(sharding.device_set, key=lambda device: device.id))
