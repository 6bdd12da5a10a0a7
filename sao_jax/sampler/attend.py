"""What the queries of the sampler read: the cached positions of their slot, and the tokens of this call before them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.models.transformer import Attend
from sao_jax.sampler.cache import KVCache


def cached_attend(prefix: KVCache, lengths: Int[Array, " R"], step: Int[Array, ""] | int) -> Attend:
  """The `attend` argument of `transformer.trunk` for prefill and decode.

  The carry is a `KVCache` of the tokens of this call, [L, R, ...] with N positions. The layer writes its T new keys and
  values at positions step ... step + T - 1 of it, the same for all rows, so that the loop writes no scattered
  positions and never touches the big cache; `write_rows` merges the carry into the cache once per call. Query t reads
  the first lengths[r] positions of `prefix` and positions 0 ... step + t of the carry. Both are in the cache's
  dtype, so that a token reads the same numbers whether they were cached long ago or just now.
  """
  window = prefix.k.shape[-1]
  in_prefix = jnp.arange(window, dtype=jnp.int32) < lengths[:, None]

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer_index: jax.Array, new: KVCache):
    new = _append(new, k, v, layer_index, step)
    layer = lambda x: jax.lax.dynamic_index_in_dim(x, layer_index, axis=0, keepdims=False)
    ours = KVCache(k=layer(new.k), v=layer(new.v))
    up_to = step + jnp.arange(q.shape[1], dtype=jnp.int32)
    in_new = jnp.arange(ours.k.shape[-1], dtype=jnp.int32) <= up_to[:, None]
    theirs = KVCache(k=layer(prefix.k), v=layer(prefix.v))
    return _attention(q, theirs, ours, in_prefix, in_new), new

  return attend


def _append(new: KVCache, k: jax.Array, v: jax.Array, layer_index: jax.Array, step: Int[Array, ""] | int) -> KVCache:
  """Writes keys and values [R, T, K, h] of one layer at positions step ... of `new`, cast to its dtype."""
  k = jnp.moveaxis(k, 1, -1)[None].astype(new.k.dtype)
  v = jnp.moveaxis(v, 1, 2)[None].astype(new.v.dtype)
  return KVCache(
    k=jax.lax.dynamic_update_slice(new.k, k, (layer_index, 0, 0, 0, step)),
    v=jax.lax.dynamic_update_slice(new.v, v, (layer_index, 0, 0, step, 0)),
  )


def _attention(
  q: Float[Array, "R T H h"], prefix: KVCache, new: KVCache, in_prefix: jax.Array, in_new: jax.Array
) -> Float[Array, "R T H h"]:
  """Grouped-query attention over two stretches of keys, one softmax over both; scores and softmax in fp32.

  `prefix` [R, K, h, W] with mask [R, W], `new` [R, K, h, N] with mask [T, N].
  """
  rows, length, heads, dim = q.shape
  kv_heads = new.k.shape[1]
  group = heads // kv_heads
  q = q.reshape(rows, length, kv_heads, group, dim).transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)

  def scores(keys: jax.Array, mask: jax.Array) -> jax.Array:  # [R, K, group · T, positions]
    products = jnp.einsum("rkqh,rkhw->rkqw", q, keys.astype(q.dtype), preferred_element_type=jnp.float32)
    return jnp.where(mask, products * dim**-0.5, jnp.finfo(jnp.float32).min)

  parts = [scores(new.k, jnp.tile(in_new, (group, 1)))]
  if prefix.k.shape[-1]:
    parts.append(scores(prefix.k, in_prefix[:, None, None]))
  peak = jnp.max(jnp.stack([jnp.max(part, axis=-1, keepdims=True) for part in parts]), axis=0)
  weights = [jnp.exp(part - peak) for part in parts]
  total = sum(jnp.sum(part, axis=-1, keepdims=True) for part in weights)
  values = [new.v, prefix.v][: len(parts)]
  out = sum(
    jnp.einsum(
      "rkqw,rkwh->rkqh", (part / total).astype(q.dtype), value.astype(q.dtype), preferred_element_type=jnp.float32
    )
    for part, value in zip(weights, values, strict=True)
  )
  out = out.astype(q.dtype).reshape(rows, kv_heads, group, length, dim).transpose(0, 3, 1, 2, 4)
  return out.reshape(rows, length, heads, dim)
