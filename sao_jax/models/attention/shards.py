"""Attention of packed rows on a mesh: rows over the batch axes, heads over tensor, queries over context.

Keys and values are gathered over context, since grouped ones are small: what a device holds of them is K / H of the
queries. Their gradients are scattered back. A device then reads all keys up to its queries, so that late queries cost
more than early ones. Of a row cut into 2 c chunks, device i of c therefore computes chunks i and 2 c - 1 - i: equal
work for all. Queries travel there and outputs back inside the call; outside, every device keeps a stretch of the row.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from sao_jax.parallel.layout import Layout


@runtime_checkable
class ShardAttention(Protocol):
  """Attention of one device: some queries of its rows, and the whole rows' keys and values."""

  def __call__(
    self,
    q: Float[Array, "B t H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K v"],
    q_segments: Int[Array, "B t"],
    kv_segments: Int[Array, "B T"],
    order: np.ndarray,
    shard: jax.Array | int,
    scale: float,
  ) -> Float[Array, "B t H v"]:
    """softmax(q kᵀ · scale) v, causal within segments; query head i reads kv head i // (H / K).

    Args:
      q: queries.
      k: keys.
      v: values.
      q_segments: segments of the queries.
      kv_segments: segments of the keys.
      order: [shards, t], the index in the row of every query of every shard; static.
      shard: the shard that these queries are.
      scale: factor on the scores.
    """


def query_order(length: int, shards: int) -> np.ndarray:
  """The index in the row of every query that a shard computes, int32 [shards, T / shards]; see above.

  Contiguous, if the row is not divisible by 2 c.

  >>> query_order(8, 2).tolist()
  [[0, 1, 6, 7], [4, 5, 2, 3]]
  """
  index = np.arange(length, dtype=np.int32)
  if shards == 1 or length % (2 * shards):
    return index.reshape(shards, -1)
  chunks = index.reshape(2 * shards, -1)
  return np.stack([np.concatenate([chunks[even], chunks[odd]]) for even, odd in _chunks(shards)])


def _chunks(shards: int) -> list[tuple[int, int]]:
  """The two chunks of every shard, the one with the even number first."""
  pairs = [(shard, 2 * shards - 1 - shard) for shard in range(shards)]
  return [(first, second) if first % 2 == 0 else (second, first) for first, second in pairs]


def on_mesh(compute: ShardAttention, layout: Layout) -> ShardAttention:
  """Returns `compute` for whole arrays on a mesh."""

  def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    kv_segments: jax.Array,
    order: np.ndarray,
    shard: int,
    scale: float,
  ) -> jax.Array:
    del kv_segments, order, shard

    # What one device does with its stretch of its rows.
    def local(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
      k, v = (gather_sequence(own_kv_heads(x, q.shape[2], heads, layout), layout) for x in (k, v))
      return attend_stretch(compute, q, k, v, segments, scale, layout)

    # Every array is divided by rows, tokens and heads.
    heads = q.shape[2]
    q_spec = layout.spec("batch", "sequence", "heads", None)
    kv_spec = layout.spec("batch", "sequence", "kv_heads", None)
    in_specs = (q_spec, kv_spec, kv_spec, layout.spec("batch", "sequence"))
    sharded = jax.shard_map(local, mesh=layout.mesh, in_specs=in_specs, out_specs=q_spec, check_vma=False)
    return sharded(q, k, v, q_segments)

  return attention


def attend_stretch(
  compute: ShardAttention,
  q: Float[Array, "B t H h"],
  k: Float[Array, "B T K h"],
  v: Float[Array, "B T K v"],
  segments: Int[Array, "B t"],
  scale: float,
  layout: Layout,
) -> Float[Array, "B t H v"]:
  """Attention of one device: a stretch of each of its rows reads the keys and values of the whole row.

  Args:
    compute: the attention of the queries that a device computes.
    q: queries of this device's tokens.
    k: keys.
    v: values.
    segments: segments of this device's tokens.
    scale: factor on the scores.
    layout: of all; its axes of "sequence" split the rows.
  """
  context, shards = layout.rules.mesh_axes("sequence"), layout.shards("sequence")
  order = query_order(k.shape[1], shards)
  even = shards > 1 and order[0, -1] + 1 == order.size  # the first shard has the last chunk, too
  shard, kv_segments = jax.lax.axis_index(context) if shards > 1 else 0, gather_sequence(segments, layout)

  if even:
    q, segments = (_exchange(x, context, shards) for x in (q, segments))
  out = compute(q, k, v, segments, kv_segments, order, shard, scale)
  return _exchange(out, context, shards, back=True) if even else out


def gather_sequence(x: Shaped[Array, "B t ..."], layout: Layout) -> Shaped[Array, "B T ..."]:
  """Whole rows, on each device, from the stretches that the devices hold; gradients are scattered back as sums."""
  if layout.shards("sequence") == 1:
    return x
  return jax.lax.all_gather(x, layout.rules.mesh_axes("sequence"), axis=1, tiled=True)


def own_kv_heads(x: Float[Array, "B S K h"], own_heads: int, heads: int, layout: Layout) -> Float[Array, "B S k h"]:
  """The kv heads that this device's heads of queries read, where not every device has only those.

  Args:
    x: keys or values, as they are on this device.
    own_heads: heads of queries on this device.
    heads: H, those of all devices.
    layout: of both.
  """
  if layout.rules.heads == layout.rules.kv_heads or own_heads == heads:
    return x
  kv_heads = x.shape[2] * layout.shards("kv_heads")
  if x.shape[2] != kv_heads:
    raise NotImplementedError("kv heads are split over other mesh axes than the heads that read them.")

  # All kv heads are here, and consecutive ones are read by consecutive heads.
  group = heads // kv_heads
  first = jax.lax.axis_index(layout.rules.mesh_axes("heads")) * own_heads
  if own_heads % group == 0 or group % own_heads == 0:
    return jax.lax.dynamic_slice_in_dim(x, first // group, max(1, own_heads // group), axis=2)
  return jnp.take(x, (first + jnp.arange(own_heads)) // group, axis=2)  # one for every head


def _exchange(
  x: Shaped[Array, "B t ..."], axes: tuple[str, ...], shards: int, back: bool = False
) -> Shaped[Array, "B t ..."]:
  """From a stretch of the row on every device to its two chunks of `query_order`, or back.

  A stretch is an even and an odd chunk; no device gets two even ones.
  """
  # A half of the stretch at a time, each to another device.
  halves = []
  for half, chunks in enumerate(zip(*_chunks(shards), strict=True)):
    pairs = [(chunk // 2, shard) for shard, chunk in enumerate(chunks)]
    pairs = [(there, here) for here, there in pairs] if back else pairs
    halves.append(jax.lax.ppermute(jnp.split(x, 2, axis=1)[half], axes, pairs))
  return jnp.concatenate(halves, axis=1)
