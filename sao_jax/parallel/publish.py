"""Publishing: a copy of the training parameters for the sampler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sao_jax.parallel.params import Params


def make_publish(
  target_shardings: Any | None,
  dtype: Any | None = None,
  *,
  prepare: Callable[[Params], Params] = lambda params: params,
  gathered: jax.sharding.Sharding | None = None,
) -> Callable[[Params], Params]:
  """Returns `publish(params)`, a copy of `params` where and how the sampler wants it.

  The copy never shares a buffer with `params`: the train step donates that tree, and a sampler that held on to a part
  of it would read freed memory. Floating leaves are cast to `dtype` before they travel.

  Args:
    target_shardings: a sharding, or a tree of shardings, of the sampler's devices; None leaves the copy in place.
    dtype: the dtype of the copy: one for all floating leaves, or a tree with one for each; None keeps the dtypes.
    prepare: maps the training tree to the tree that is copied, for example merges LoRA.
    gathered: where parameters live on devices of several processes, the replicated sharding on all of them: the copy
      comes to every process whole, and goes on from there to the sampler's devices, which are its own.
  """

  def copy(leaf: jax.Array, dtype: Any | None = None) -> jax.Array:
    cast = dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
    return jnp.array(leaf, dtype=dtype if cast else leaf.dtype, copy=True)

  # One program for the whole tree; the copies then travel to the sampler's devices.
  @functools.partial(jax.jit, out_shardings=gathered)
  def copy_tree(params: Params) -> Params:
    params = prepare(params)
    if isinstance(dtype, dict):
      return jax.tree.map(copy, params, dtype)
    return jax.tree.map(lambda leaf: copy(leaf, dtype), params)

  def publish(params: Params) -> Params:
    copied = copy_tree(params)
    if gathered is not None:
      copied = jax.tree.map(lambda leaf: leaf.addressable_data(0), copied)
    return copied if target_shardings is None else jax.device_put(copied, target_shardings)

  return publish
