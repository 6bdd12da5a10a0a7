"""The cache: per slot what attention keeps of the tokens written so far, keys and values or the latents of both."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.sparse_attention import is_full


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


@flax.struct.dataclass
class LatentCache:
  """Of latent attention: one vector per token and layer, for all heads, and one key of each indexer.

  Attributes:
    latent: [S, L, C, m], m = compressed numbers and rotary key.
    index: [S, F, C, i], F indexers; None without sparse attention.
  """

  latent: Float[Array, "S L C m"]
  index: Float[Array, "S F C i"] | None


Cache = KVCache | LatentCache


def empty_cache(config: ModelConfig, rows: int, length: int, dtype: jax.typing.DTypeLike) -> Cache:
  """Zeros for `rows` slots of `length` positions."""
  zeros = lambda *shape: jnp.zeros((rows, *shape), dtype)
  layers = config.num_layers
  if config.kv_lora_rank:
    latent = zeros(layers, length, config.kv_lora_rank + config.qk_rope_head_dim)
    index = zeros(sum(is_full(config)), length, config.index_head_dim) if config.index_topk else None
    return LatentCache(latent=latent, index=index)
  heads, dim = config.num_kv_heads, config.head_dim
  return KVCache(k=zeros(layers, heads, dim, length), v=zeros(layers, heads, length, dim))


def position_axes(cache: Cache) -> Cache:
  """The axis of positions of every array of a cache."""
  return KVCache(k=4, v=3) if isinstance(cache, KVCache) else jax.tree.map(lambda _: 2, cache)


def num_positions(cache: Cache) -> int:
  """How many positions a slot has."""
  return cache.k.shape[4] if isinstance(cache, KVCache) else cache.latent.shape[2]


def cache_dtype(cache: Cache) -> jnp.dtype:
  """The dtype of its arrays."""
  return jax.tree.leaves(cache)[0].dtype


def read_window(cache: Cache, slots: Int[Array, " R"] | None, window: int) -> Cache:
  """The first `window` positions of the given slots (clipped to valid ones; None: all of them, in order)."""
  cut = jax.tree.map(lambda x, axis: jax.lax.slice_in_dim(x, 0, window, axis=axis), cache, position_axes(cache))
  if slots is None:
    return cut
  return jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode="clip"), cut)


def write_rows(
  cache: Cache, new: Cache, slots: Int[Array, " R"], starts: Int[Array, " R"], counts: Int[Array, " R"]
) -> Cache:
  """Writes the first counts[r] positions of row r of `new` to positions starts[r] ... of slot slots[r].

  Nothing else changes; a row with count 0 or a slot out of range writes nothing. JAX clamps an update that would leave
  the array, over the entries before it, so the block is read, shifted inside the cache, merged and written back; the
  caller keeps starts + counts ≤ C. In place when `cache` is donated.
  """
  num_slots, length = jax.tree.leaves(cache)[0].shape[0], num_positions(cache)
  width = min(num_positions(new), length)

  def write(row: jax.Array, cache: Cache) -> Cache:
    slot, start = slots[row], starts[row]
    count = jnp.where((slot >= 0) & (slot < num_slots), counts[row], 0)
    block_start = jnp.clip(start, 0, length - width)
    index = jnp.arange(width, dtype=jnp.int32) - (start - block_start)
    written = (index >= 0) & (index < count)

    def merge(old: jax.Array, rows: jax.Array, axis: int) -> jax.Array:
      update = jnp.take(jax.lax.dynamic_slice_in_dim(rows, row, 1, axis=0), index, axis=axis, mode="clip")
      position = [slot, *[0] * (old.ndim - 1)]
      position[axis] = block_start
      block = jax.lax.dynamic_slice(old, position, update.shape)
      mask = jnp.expand_dims(written, tuple(i for i in range(old.ndim) if i != axis))
      return jax.lax.dynamic_update_slice(old, jnp.where(mask, update.astype(old.dtype), block), position)

    return jax.tree.map(merge, cache, new, position_axes(cache))

  return jax.lax.fori_loop(0, slots.shape[0], write, cache)


def clear_rows(cache: Cache, slots: Int[Array, " R"]) -> Cache:
  """Zeros for everything that weights of attention multiply, in the given slots; those out of range are skipped.

  A sequence never reads what an earlier one left behind its own tokens, but its weights there are 0, and 0 · NaN is
  NaN: after one sequence that was not finite, its slot would be lost for ever. In place when `cache` is donated.
  """

  def clear(row: jax.Array, values: jax.Array) -> jax.Array:
    slot = slots[row]
    old = jax.lax.dynamic_slice_in_dim(values, slot, 1)
    valid = (slot >= 0) & (slot < values.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(values, jnp.where(valid, 0, old), slot, 0)

  clear_all = lambda values: jax.lax.fori_loop(0, slots.shape[0], clear, values)
  if isinstance(cache, KVCache):
    return cache.replace(v=clear_all(cache.v))
  return cache.replace(latent=clear_all(cache.latent))


def update_slots(
  cache: Cache,
  new: Cache,
  slots: Int[Array, " R"] | None,
  starts: Int[Array, " R"],
  counts: Int[Array, " R"],
  *,
  fresh: bool = False,
  shardings: Cache | None = None,
) -> Cache:
  """`write_rows`, on one device or on a mesh.

  Args:
    cache: of S slots.
    new: of R rows.
    slots: None: row r belongs to slot r, and R = S.
    starts: see `write_rows`.
    counts: see `write_rows`.
    fresh: static; the sequences are new, and their slots are cleared first (`clear_rows`).
    shardings: of `cache` on a mesh. Each device then updates the slots that it holds. Left to the partitioner, a loop
      over slots would gather the whole cache on every device, once for every row.
  """
  in_order = slots is None
  if in_order:
    slots = jnp.arange(starts.shape[0], dtype=jnp.int32)

  def update(cache: Cache, new: Cache, slots: jax.Array, starts: jax.Array, counts: jax.Array) -> Cache:
    return write_rows(clear_rows(cache, slots) if fresh else cache, new, slots, starts, counts)

  if shardings is None:
    return update(cache, new, slots, starts, counts)

  specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
  mesh, slot_axes = jax.tree.leaves(shardings)[0].mesh, jax.tree.leaves(shardings)[0].spec[0]
  one_row = PartitionSpec(slot_axes if in_order else None)
  rows = jax.tree.map(lambda sharding: PartitionSpec(*one_row, *sharding.spec[1:]), shardings)

  def update_own(cache: Cache, new: Cache, slots: jax.Array, starts: jax.Array, counts: jax.Array) -> Cache:
    first = jax.lax.axis_index(slot_axes or ()) * jax.tree.leaves(cache)[0].shape[0]
    return update(cache, new, slots - first, starts, counts)

  in_specs = (specs, rows, one_row, one_row, one_row)
  return jax.shard_map(update_own, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)(
    cache, new, slots, starts, counts
  )
