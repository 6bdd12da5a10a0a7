"""The KV cache: per slot the keys and values of the tokens written so far."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig


@flax.struct.dataclass
class KVCache:
  """Keys and values, positions 0 ... C - 1 of every slot (or of a few rows, of a few positions).

  The key of a position is a column and its value a row: both products of attention run over contiguous memory,
  whatever the number of positions.

  Attributes:
    k: [S, L, K, h, C], rotary embedding applied.
    v: [S, L, K, C, h].
  """

  k: Float[Array, "S L K h C"]
  v: Float[Array, "S L K C h"]


def empty_cache(config: ModelConfig, rows: int, length: int, dtype: str) -> KVCache:
  """Zeros for `rows` slots of `length` positions."""
  layers, heads, dim = config.num_layers, config.num_kv_heads, config.head_dim
  return KVCache(
    k=jnp.zeros((rows, layers, heads, dim, length), dtype), v=jnp.zeros((rows, layers, heads, length, dim), dtype)
  )


def read_window(cache: KVCache, slots: Int[Array, " R"] | None, window: int) -> KVCache:
  """The first `window` positions of the given slots (clipped to valid ones; None: all of them, in order)."""
  cut = KVCache(k=cache.k[..., :window], v=cache.v[:, :, :, :window])
  if slots is None:
    return cut
  return jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode="clip"), cut)


def write_rows(
  cache: KVCache, new: KVCache, slots: Int[Array, " R"], starts: Int[Array, " R"], counts: Int[Array, " R"]
) -> KVCache:
  """Writes the first counts[r] positions of row r of `new` to positions starts[r] ... of slot slots[r].

  Nothing else changes; a row with count 0 writes nothing, whatever its slot. JAX clamps an update that would leave the
  array, over the entries before it, so the block is read, shifted inside the cache, merged and written back; the caller
  keeps starts + counts ≤ C. In place when `cache` is donated.
  """
  length = cache.k.shape[-1]
  width = min(new.k.shape[-1], length)

  def write(row: jax.Array, arrays: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    slot, start, count = slots[row], starts[row], counts[row]
    block_start = jnp.clip(start, 0, length - width)
    index = jnp.arange(width, dtype=jnp.int32) - (start - block_start)
    written = (index >= 0) & (index < count)

    def merge(old: jax.Array, rows: jax.Array, axis: int) -> jax.Array:
      update = jnp.take(jax.lax.dynamic_slice_in_dim(rows, row, 1, axis=0), index, axis=axis, mode="clip")
      position = [slot, 0, 0, 0, 0]
      position[axis] = block_start
      block = jax.lax.dynamic_slice(old, position, update.shape)
      mask = jnp.expand_dims(written, tuple(i for i in range(5) if i != axis))
      return jax.lax.dynamic_update_slice(old, jnp.where(mask, update.astype(old.dtype), block), position)

    return merge(arrays[0], new.k, 4), merge(arrays[1], new.v, 3)

  k, v = jax.lax.fori_loop(0, slots.shape[0], write, (cache.k, cache.v))
  return KVCache(k=k, v=v)
