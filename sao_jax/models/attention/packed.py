"""Attention over packed rows, chosen for the devices; and attention with an explicit mask [B, T, S]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.models.attention.blockwise import blockwise_shard
from sao_jax.models.attention.shards import on_mesh, query_order
from sao_jax.parallel.layout import ONE_DEVICE, Layout


def packed_causal_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
  """mask[b, t, s]: may token t of row b read token s? Same segment, and s not after t in the row.

  Causality goes by the index in the row, not by position. Padding (segment 0) reads padding only, so no row of the
  mask is empty.
  """
  index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
  causal = index[:, None] >= index[None, :]
  return (segment_ids[:, :, None] == segment_ids[:, None, :]) & causal


def grouped_attention(
  q: Float[Array, "B T H h"],
  k: Float[Array, "B S K h"],
  v: Float[Array, "B S K v"],
  mask: Bool[Array, "B T S"],
  scale: float | None = None,
) -> Float[Array, "B T H v"]:
  """softmax(q kᵀ · scale) v; query head i reads kv head i // (H / K). Scores and softmax in fp32.

  The scale is 1 / sqrt(h) unless given. A query that may read nothing gets the mean of v (finite; nobody uses it).
  """
  batch, length, heads, dim = q.shape
  kv_heads = k.shape[2]
  scale = dim**-0.5 if scale is None else scale
  q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
  scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * scale
  scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("bkgts,bskv->btkgv", weights, v).reshape(batch, length, heads, v.shape[-1])


def rowwise_attention(
  q: Float[Array, "B T H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K v"], mask: Bool[Array, "B T S"]
) -> Float[Array, "B T H v"]:
  """`grouped_attention` one row and kv head at a time, scores computed again in the backward pass.

  For CPUs: the scores of a row stay in the cache, and every product is a plain 2-D one. On an accelerator a loop over
  rows would leave most of the hardware idle.
  """
  group = q.shape[2] // k.shape[2]

  def row(inputs: tuple[jax.Array, ...]) -> jax.Array:
    q, k, v, mask = inputs
    outs = []
    for head in range(k.shape[1]):
      # All queries that read this kv head, as one 2-D product.
      queries = q[:, head * group : (head + 1) * group].reshape(-1, q.shape[-1])
      scores = jnp.dot(queries, k[:, head].T, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
      scores = scores.reshape(-1, group, k.shape[0])
      scores = jnp.where(mask[:, None], scores, jnp.finfo(jnp.float32).min)
      weights = jax.nn.softmax(scores, axis=-1).reshape(-1, k.shape[0]).astype(v.dtype)
      outs.append(jnp.dot(weights, v[:, head]).reshape(-1, group, v.shape[-1]))
    return jnp.concatenate(outs, axis=1)

  return jax.lax.map(jax.checkpoint(row, prevent_cse=False), (q, k, v, mask))


@runtime_checkable
class PackedAttention(Protocol):
  """Attention over packed rows: causal by the index in the row, within segments."""

  def __call__(
    self,
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K v"],
    segment_ids: Int[Array, "B T"],
    scale: float | None = None,
  ) -> Float[Array, "B T H v"]:
    """softmax(q kᵀ · scale) v; query head i reads kv head i // (H / K). Softmax in fp32.

    Padding (segment 0) reads and gives nothing, whatever stands there: its output and all its gradients are 0.

    Args:
      q: queries.
      k: keys.
      v: values, perhaps of another width.
      segment_ids: the segments of the tokens.
      scale: factor on the scores; None: 1 / sqrt(h).
    """


def packed_attention(layout: Layout = ONE_DEVICE) -> PackedAttention:
  """Returns the attention of packed rows on these devices. No array of it has two axes of length T."""
  compute = on_mesh(blockwise_shard, layout) if layout.is_sharded else blockwise_shard

  def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, scale: float | None = None
  ) -> jax.Array:
    # Weights on padding are 0, but 0 · NaN is NaN.
    real = (segment_ids > 0)[..., None, None]
    q, k, v = (jnp.where(real, x, 0) for x in (q, k, v))

    order, scale = query_order(q.shape[1], 1), q.shape[-1] ** -0.5 if scale is None else scale
    out = compute(q, k, v, segment_ids, segment_ids, order, 0, scale)
    return jnp.where(real, out, 0)  # so that the gradient of padding is 0, too

  return attention


def masked_attention(layout: Layout = ONE_DEVICE) -> Callable[..., jax.Array]:
  """Returns the function of (q, k, v, mask) on these devices: one of the two above."""
  if not layout.is_sharded:
    return rowwise_attention if layout.platform == "cpu" else grouped_attention

  # The partitioner cannot split the loop over rows: every device then loops over its own rows and heads.
  whole_rows = layout.shards("sequence") == 1
  whole_groups = layout.rules.heads == layout.rules.kv_heads  # each device has the kv heads that its heads read
  if layout.platform == "cpu" and whole_rows and whole_groups:
    q, kv = layout.spec("batch", None, "heads", None), layout.spec("batch", None, "kv_heads", None)
    in_specs = (q, kv, kv, layout.spec("batch", None, None))
    return jax.shard_map(rowwise_attention, mesh=layout.mesh, in_specs=in_specs, out_specs=q, check_vma=False)
  return grouped_attention
