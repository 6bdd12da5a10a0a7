"""The cache of grouped-query attention: keys and values of every token."""

from __future__ import annotations

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.attention.grouped import GroupedAttend
from sao_jax.sampler.attend import readable, stretched_attention
from sao_jax.sampler.cache import Cache


@flax.struct.dataclass
class KVCache(Cache):
  """Keys and values, positions 0 ... C - 1 of every slot (or of a few rows, of a few positions).

  The key of a position is a column and its value a row: both products of attention run over contiguous memory,
  whatever the number of positions.

  Attributes:
    k: [S, L, K, h, C], rotary embedding applied.
    v: [S, L, K, C, h].
  """

  POSITION_AXES: ClassVar = {"k": 4, "v": 3}
  WEIGHTED: ClassVar = ("v",)
  LOGICAL_AXES: ClassVar = ("slots", None, "kv_heads")

  k: Float[Array, "S L K h C"]
  v: Float[Array, "S L K C h"]

  @classmethod
  def empty(cls, config: ModelConfig, rows: int, length: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """Zeros for `rows` slots of `length` positions."""
    layers, heads, dim = config.num_layers, config.num_kv_heads, config.head_dim
    return cls(
      k=jnp.zeros((rows, layers, heads, dim, length), dtype), v=jnp.zeros((rows, layers, heads, length, dim), dtype)
    )

  def attend(
    self, config: ModelConfig, lengths: Int[Array, " R"], step: Int[Array, ""] | int, num_new: int
  ) -> GroupedAttend:
    """See `Cache.attend` and `cached_attend`."""
    del config, num_new
    return cached_attend(self, lengths, step)


def cached_attend(past: KVCache, lengths: Int[Array, " R"], step: Int[Array, ""] | int) -> GroupedAttend:
  """Returns the `attend` of prefill and decode.

  The carry is a `KVCache` of the R rows with N positions for the tokens of this call. The layer writes its T new keys
  and values at positions step ... step + T - 1 of it, the same for all rows: the loop over steps scatters nothing
  and never touches the big cache, to which `update_slots` takes them once per call. Query t of row r reads the first
  lengths[r] positions of `past`, and positions 0 ... step + t of the carry. Both are in the cache's dtype: a token
  reads the same numbers whether they were cached long ago or just now.
  """
  window = past.num_positions

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer_index: jax.Array, new: KVCache):
    k = jnp.moveaxis(k, 1, -1)[:, None].astype(new.k.dtype)  # [R, 1, K, h, T]
    v = jnp.moveaxis(v, 1, 2)[:, None].astype(new.v.dtype)  # [R, 1, K, T, h]
    new = KVCache(
      k=jax.lax.dynamic_update_slice(new.k, k, (0, layer_index, 0, 0, step)),
      v=jax.lax.dynamic_update_slice(new.v, v, (0, layer_index, 0, step, 0)),
    )

    in_past, in_new = readable(window, lengths, new.num_positions, step, q.shape[1])
    stretches = [(new, in_new), (past, in_past)] if window else [(new, in_new)]
    layer = lambda x: jax.lax.dynamic_index_in_dim(x, layer_index, axis=1, keepdims=False)
    return stretched_attention(q, [(layer(cache.k), layer(cache.v), mask) for cache, mask in stretches]), new

  return attend
