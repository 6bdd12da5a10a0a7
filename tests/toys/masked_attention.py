"""Attention by the plain formula, with a mask [B, T, S]: what the attention of packed rows is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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
