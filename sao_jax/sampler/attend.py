"""Attention of the sampler's queries: over the cache of their slot, and over the tokens of this call before them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def readable(
  window: int, lengths: Int[Array, " R"], num_new: int, step: Int[Array, ""] | int, num_queries: int
) -> tuple[Bool[Array, "R 1 W"], Bool[Array, "1 T N"]]:
  """Masks over the past positions and over those of this call: True where query t of row r may read."""
  in_past = (jnp.arange(window, dtype=jnp.int32) < lengths[:, None])[:, None]
  queries = step + jnp.arange(num_queries, dtype=jnp.int32)
  return in_past, (jnp.arange(num_new, dtype=jnp.int32) <= queries[:, None])[None]


def stretched_attention(
  q: Float[Array, "R T H h"],
  stretches: list[tuple[Float[Array, "R K h _"], Float[Array, "R K _ v"], Bool[Array, "_ _ _"]]],
  scale: float | None = None,
) -> Float[Array, "R T H v"]:
  """Grouped attention with one softmax over several stretches of (keys, values, mask).

  Scores and softmax in fp32. Every query has a position to read in one of the stretches.
  """
  rows, length, heads, dim = q.shape
  kv_heads = stretches[0][0].shape[1]
  group = heads // kv_heads
  scale = dim**-0.5 if scale is None else scale
  q = q.reshape(rows, length, kv_heads, group, dim).transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)

  def scores(k: jax.Array, mask: jax.Array) -> jax.Array:  # [R, K, group, T, C]
    products = jnp.einsum("rkqh,rkhc->rkqc", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
    products = products.reshape(rows, kv_heads, group, length, k.shape[-1]) * scale
    return jnp.where(mask[:, None, None], products, -jnp.inf)

  # One softmax over all stretches: the largest score and the sum are over all of them.
  parts = [scores(k, mask) for k, _, mask in stretches]
  peak = functools.reduce(jnp.maximum, [jnp.max(part, axis=-1, keepdims=True) for part in parts])
  parts = [jnp.exp(part - peak) for part in parts]
  total = sum(jnp.sum(part, axis=-1, keepdims=True) for part in parts)

  width = stretches[0][1].shape[-1]
  out = jnp.zeros((*q.shape[:-1], width), jnp.float32)
  for part, (_, v, _) in zip(parts, stretches, strict=True):
    weights = (part / total).astype(q.dtype).reshape(rows, kv_heads, -1, v.shape[2])
    out += jnp.einsum("rkqc,rkcv->rkqv", weights, v.astype(q.dtype), preferred_element_type=jnp.float32)

  out = out.astype(q.dtype).reshape(rows, kv_heads, group, length, width).transpose(0, 3, 1, 2, 4)
  return out.reshape(rows, length, heads, width)
