"""The cache: per slot what attention keeps of the tokens written so far, whatever the kind of attention keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from sao_jax.config import ModelConfig
from sao_jax.models.attention import Attend


class Cache:
  """Common base of the caches of all kinds of attention, each a pytree of arrays [S, ...] over S slots.

  Attributes:
    POSITION_AXES: for every field, its axis of positions.
    WEIGHTED: the fields that weights of attention multiply.
    LOGICAL_AXES: the logical axes of every array's first dimensions; a mesh does not split the others.
  """

  POSITION_AXES: ClassVar[Mapping[str, int]]
  WEIGHTED: ClassVar[tuple[str, ...]]
  LOGICAL_AXES: ClassVar[tuple[str | None, ...]]

  @classmethod
  def empty(cls, config: ModelConfig, rows: int, length: int, dtype: jax.typing.DTypeLike) -> Cache:
    """Zeros for `rows` slots of `length` positions."""
    raise NotImplementedError

  def attend(self, config: ModelConfig, lengths: Int[Array, " R"], step: Int[Array, ""] | int, num_new: int) -> Attend:
    """Returns the `attend` of R rows that have this cache as their past and an empty one as their carry.

    Args:
      config: static.
      lengths: how many positions of this cache each row may read.
      step: the position in the carry that the first of the new tokens is written to.
      num_new: positions of the carry: room for the tokens of this call.
    """
    raise NotImplementedError

  @property
  def num_slots(self) -> int:
    """The number of slots, or of rows."""
    return jax.tree.leaves(self)[0].shape[0]

  @property
  def num_positions(self) -> int:
    """The number of positions of a slot."""
    name, axis = next(iter(self.POSITION_AXES.items()))
    return getattr(self, name).shape[axis]

  @property
  def dtype(self) -> jnp.dtype:
    """The dtype of the arrays."""
    return jax.tree.leaves(self)[0].dtype

  @property
  def position_axes(self) -> Cache:
    """The axis of positions of every array, as a tree like this one."""
    return self.replace(**{name: axis for name, axis in self.POSITION_AXES.items() if getattr(self, name) is not None})


def read_window(cache: Cache, slots: Int[Array, " R"] | None, window: int) -> Cache:
  """The first `window` positions of the given slots (clipped to valid ones; None: all of them, in order)."""
  cut = jax.tree.map(lambda x, axis: jax.lax.slice_in_dim(x, 0, window, axis=axis), cache, cache.position_axes)
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
  num_slots, length = cache.num_slots, cache.num_positions
  width = min(new.num_positions, length)

  def write(row: jax.Array, cache: Cache) -> Cache:
    slot, start = slots[row], starts[row]
    count = jnp.where((slot >= 0) & (slot < num_slots), counts[row], 0)

    # Writing in place wants a block inside the cache: near its end, the block starts before `start`.
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

    return jax.tree.map(merge, cache, new, cache.position_axes)

  return jax.lax.fori_loop(0, slots.shape[0], write, cache)


def clear_rows(cache: Cache, slots: Int[Array, " R"]) -> Cache:
  """Zeroes the cached values (or latents) of the given slots; slots out of range are skipped.

  A sequence gives weight 0 to what an earlier one left behind its own tokens, and 0 · NaN is NaN: after one sequence
  that was not finite, its slot would be lost for ever. In place when `cache` is donated.
  """

  def clear(row: jax.Array, values: jax.Array) -> jax.Array:
    slot = slots[row]
    old = jax.lax.dynamic_slice_in_dim(values, slot, 1)
    valid = (slot >= 0) & (slot < values.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(values, jnp.where(valid, 0, old), slot, 0)

  clear_all = lambda values: jax.lax.fori_loop(0, slots.shape[0], clear, values)
  return cache.replace(**{name: clear_all(getattr(cache, name)) for name in cache.WEIGHTED})


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
    cache: S slots.
    new: R rows.
    slots: the slot of each row; None: row r belongs to slot r, and R = S.
    starts: the first position that each row is written to.
    counts: the number of positions to write of each row.
    fresh: static; the sequences are new, and their slots are cleared first (`clear_rows`).
    shardings: those of `cache` on a mesh; None: one device.
  """
  in_order = slots is None
  if in_order:
    slots = jnp.arange(starts.shape[0], dtype=jnp.int32)

  def update(cache: Cache, new: Cache, slots: jax.Array, starts: jax.Array, counts: jax.Array) -> Cache:
    return write_rows(clear_rows(cache, slots) if fresh else cache, new, slots, starts, counts)

  if shardings is None:
    return update(cache, new, slots, starts, counts)

  # Each device updates the slots that it holds. Left to the partitioner, a loop over slots would gather the whole cache
  # on every device, once for every row.
  specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
  mesh, slot_axes = jax.tree.leaves(shardings)[0].mesh, jax.tree.leaves(shardings)[0].spec[0]
  one_row = PartitionSpec(slot_axes if in_order else None)
  rows = jax.tree.map(lambda sharding: PartitionSpec(*one_row, *sharding.spec[1:]), shardings)

  def update_own(cache: Cache, new: Cache, slots: jax.Array, starts: jax.Array, counts: jax.Array) -> Cache:
    first = jax.lax.axis_index(slot_axes or ()) * cache.num_slots
    return update(cache, new, slots - first, starts, counts)

  in_specs = (specs, rows, one_row, one_row, one_row)
  return jax.shard_map(update_own, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)(
    cache, new, slots, starts, counts
  )
