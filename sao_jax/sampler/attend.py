"""What the queries of the sampler read: the cached positions of their slot, and the tokens of this call before them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.models.transformer import Attend
from sao_jax.sampler.cache import KVCache


def cached_attend(past: KVCache, lengths: Int[Array, " R"], step: Int[Array, ""] | int) -> Attend:
  """The `attend` argument of `transformer.trunk` for prefill and decode.

  The carry is a `KVCache` of the R rows with N positions for the tokens of this call. The layer writes its T new keys
  and values at positions step ... step + T - 1 of it, the same for all rows: the loop over steps scatters nothing
  and never touches the big cache, to which `update_slots` takes them once per call. Query t of row r reads the first
  lengths[r] positions of `past`, and positions 0 ... step + t of the carry. Both are in the cache's dtype: a token
  reads the same numbers whether they were cached long ago or just now.
  """
  window = past.k.shape[-1]

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer_index: jax.Array, new: KVCache):
    k = jnp.moveaxis(k, 1, -1)[:, None].astype(new.k.dtype)  # [R, 1, K, h, T]
    v = jnp.moveaxis(v, 1, 2)[:, None].astype(new.v.dtype)  # [R, 1, K, T, h]
    new = KVCache(
      k=jax.lax.dynamic_update_slice(new.k, k, (0, layer_index, 0, 0, step)),
      v=jax.lax.dynamic_update_slice(new.v, v, (0, layer_index, 0, step, 0)),
    )
    in_past, in_new = readable(window, lengths, new.k.shape[-1], step, q.shape[1])
    stretches = [(new, in_new), (past, in_past)] if window else [(new, in_new)]
    layer = lambda x: jax.lax.dynamic_index_in_dim(x, layer_index, axis=1, keepdims=False)
    return stretched_attention(q, [(layer(cache.k), layer(cache.v), mask) for cache, mask in stretches]), new

  return attend


def readable(
  window: int, lengths: Int[Array, " R"], num_new: int, step: Int[Array, ""] | int, num_queries: int
) -> tuple[Bool[Array, "R 1 W"], Bool[Array, "1 T N"]]:
  """Which of the past positions, and which of those of this call, query t of row r may read."""
  in_past = (jnp.arange(window, dtype=jnp.int32) < lengths[:, None])[:, None]
  queries = step + jnp.arange(num_queries, dtype=jnp.int32)
  return in_past, (jnp.arange(num_new, dtype=jnp.int32) <= queries[:, None])[None]


def stretched_attention(
  q: Float[Array, "R T H h"],
  stretches: list[tuple[Float[Array, "R K h _"], Float[Array, "R K _ v"], Bool[Array, "_ _ _"]]],
  scale: float | None = None,
) -> Float[Array, "R T H v"]:
  """`grouped_attention` of `models.attention` with one softmax over several stretches of (keys, values, mask).

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
