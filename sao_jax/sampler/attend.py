"""What the queries of the sampler read: the cached positions of their slot, and the tokens of this call before them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.models.transformer import Attend
from sao_jax.sampler.cache import KVCache


def cached_attend(lengths: Int[Array, " R"], window: int, step: Int[Array, ""] | int) -> Attend:
  """The `attend` argument of `transformer.trunk` for prefill and decode.

  The carry is what `read_window` returned for the R rows: `window` positions of the past, of which row r uses the
  first lengths[r], and behind them the tokens of this call. The layer writes its T new keys and values at window + step,
  the same place for all rows, so that the loop scatters nothing and never touches the big cache (`write_rows` takes
  them there once per call); query t reads the past and the new tokens up to its own. Both are in the cache's dtype:
  a token reads the same numbers whether they were cached long ago or just now.
  """

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer_index: jax.Array, carry: KVCache):
    k = jnp.moveaxis(k, 1, -1)[None].astype(carry.k.dtype)  # [1, R, K, h, T]
    v = jnp.moveaxis(v, 1, 2)[None].astype(carry.v.dtype)  # [1, R, K, T, h]
    carry = KVCache(
      k=jax.lax.dynamic_update_slice(carry.k, k, (layer_index, 0, 0, 0, window + step)),
      v=jax.lax.dynamic_update_slice(carry.v, v, (layer_index, 0, 0, window + step, 0)),
    )
    index = jnp.arange(carry.k.shape[-1], dtype=jnp.int32)
    last = window + step + jnp.arange(q.shape[1], dtype=jnp.int32)
    past = (index < window) & (index < lengths[:, None])
    new = (index >= window) & (index <= last[:, None])
    layer = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer_index, axis=0, keepdims=False), carry)
    return _attention(q, layer.k, layer.v, past[:, None] | new), carry

  return attend


def _attention(
  q: Float[Array, "R T H h"], k: Float[Array, "R K h C"], v: Float[Array, "R K C h"], mask: Bool[Array, "R T C"]
) -> Float[Array, "R T H h"]:
  """Grouped-query attention as in `models.attention`, over keys and values in the layout of the cache."""
  rows, length, heads, dim = q.shape
  kv_heads, positions = k.shape[1], k.shape[-1]
  group = heads // kv_heads
  q = q.reshape(rows, length, kv_heads, group, dim).transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)
  scores = jnp.einsum("rkqh,rkhc->rkqc", q, k.astype(q.dtype), preferred_element_type=jnp.float32) * dim**-0.5
  scores = scores.reshape(rows, kv_heads, group, length, positions)
  scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype).reshape(rows, kv_heads, -1, positions)
  out = jnp.einsum("rkqc,rkch->rkqh", weights, v.astype(q.dtype))
  return out.reshape(rows, kv_heads, group, length, dim).transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, dim)
