"""Attention over packed rows, chosen for the devices."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.models.attention.blockwise import blockwise_shard
from sao_jax.models.attention.shards import ShardAttention, on_mesh, query_order
from sao_jax.models.attention.splash import splash_shard
from sao_jax.parallel.layout import ONE_DEVICE, Layout


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
  compute = shard_attention(layout)
  compute = on_mesh(compute, layout) if layout.is_sharded else compute

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


def shard_attention(layout: Layout) -> ShardAttention:
  """Returns what a single device of these computes."""
  return splash_shard if layout.platform == "tpu" else blockwise_shard
