"""Rows of all processes on one mesh: which process holds what is read from the sharding, never from a process's number.

Every process that brings rows brings the same number. Where the shards of each are its own devices', they stay; where a
row lies on the devices of several processes (`context` or `tensor` over hosts), or of others than those that bring it,
rows are exchanged by one small jitted program.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "device"  # of the mesh that rows travel over

Block = tuple[tuple[int, int], ...]  # first and last + 1 index of each dimension
Sharding = Callable[[Any], NamedSharding]


def blocks(sharding: NamedSharding, shape: Sequence[int]) -> dict[jax.Device, Block]:
  """Returns the part of a global array that each device holds."""
  parts = sharding.devices_indices_map(tuple(shape))
  bounds = lambda index: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
  return {device: bounds(index) for device, index in parts.items()}


def share_of_rows(sharding: NamedSharding, shape: Sequence[int], process: int) -> int | None:
  """Returns the number i of the share that a process holds: rows i * R ... (i + 1) * R - 1.

  None for all processes if one of them has other rows, or some that another one has, too: then rows must travel.

  >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
  >>> share_of_rows(NamedSharding(mesh, PartitionSpec("data")), (4, 8), 0)
  0
  """
  # The rows that each process holds any part of.
  rows = collections.defaultdict(set)
  for device, block in blocks(sharding, shape).items():
    rows[device.process_index] |= set(range(*block[0]))

  # Its share is a whole one, and nobody else's.
  each = shape[0] // len(rows)
  shares = {owner: min(own) // each for owner, own in rows.items()}
  whole = all(own == set(range(shares[owner] * each, (shares[owner] + 1) * each)) for owner, own in rows.items())
  return shares[process] if whole and len(set(shares.values())) == len(shares) else None


def feed(tree: Any, sharding_of: Sharding, sources: Sequence[int]) -> Any:
  """Makes global arrays of the rows that processes bring. All those that bring or get rows call it together.

  A process without any device of the shardings gets `jax.ShapeDtypeStruct`s of the global arrays.

  Args:
    tree: numpy arrays [R, ...], of the same shapes in every process; of one that brings none, the values do not matter.
    sharding_of: the sharding of the global array [R * len(sources), ...] that an array becomes.
    sources: the processes that bring rows, in the order of these.
  """
  leaves, structure = jax.tree.flatten(tree)
  shardings = [sharding_of(leaf) for leaf in leaves]
  shapes = [(leaf.shape[0] * len(sources), *leaf.shape[1:]) for leaf in leaves]
  if all(_stay(place, shape, sources) for place, shape in zip(shardings, shapes)):
    fed = [jax.make_array_from_process_local_data(place, leaf) for place, leaf in zip(shardings, leaves)]
  else:
    fed = _exchange(leaves, shardings, shapes, sources)
  return jax.tree.unflatten(structure, fed)


def _stay(sharding: NamedSharding, shape: Sequence[int], sources: Sequence[int]) -> bool:
  """Tells if every process keeps the rows that it brings, and nobody else needs any."""
  if {device.process_index for device in sharding.mesh.devices.flat} != set(sources):
    return False
  return len(sources) == 1 or share_of_rows(sharding, shape, sources[0]) is not None


def _exchange(
  leaves: Sequence[np.ndarray],
  shardings: Sequence[NamedSharding],
  shapes: Sequence[tuple[int, ...]],
  sources: Sequence[int],
) -> list[jax.Array | jax.ShapeDtypeStruct]:
  """Brings the rows of source i to where rows i * R ... of the global arrays live."""
  devices = tuple(shardings[0].mesh.devices.flat)
  getting = {device.process_index for device in devices}
  devices += tuple(each for each in jax.devices() if each.process_index in set(sources) - getting)
  abstract = lambda leaf, place, shape: jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=place)
  if not any(each.process_index == jax.process_index() for each in devices):
    return list(map(abstract, leaves, shardings, shapes))
  line = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
  spread = NamedSharding(line, PartitionSpec(AXIS))

  # A process spreads its rows over its devices, then every device picks its block of the global rows.
  spread_out = [_spread(leaf, devices, spread) for leaf in leaves]
  picks = tuple(_Pick.of(devices, sources, *each) for each in zip(leaves, shardings, shapes))
  picked = _pick(spread, picks)(spread_out)
  if jax.process_index() not in getting:
    return list(map(abstract, leaves, shardings, shapes))

  # Nothing is copied here: the blocks of this process, as parts of the global arrays.
  arrays = []
  for array, place, shape in zip(picked, shardings, shapes):
    own = {shard.device: shard.data for shard in array.addressable_shards}
    parts = [own[device] for device in place.addressable_devices_indices_map(shape)]
    arrays.append(jax.make_array_from_single_device_arrays(shape, place, parts))
  return arrays


def _spread(leaf: np.ndarray, devices: Sequence[jax.Device], spread: NamedSharding) -> jax.Array:
  """Returns [N * c, ...]: c rows of this process on each of its devices, in order, with zeros behind the last."""
  own = [device for device in devices if device.process_index == jax.process_index()]
  each = _rows_per_device(devices, leaf)
  padded = np.concatenate([leaf, np.zeros((each * len(own) - len(leaf), *leaf.shape[1:]), leaf.dtype)])
  parts = [jax.device_put(part, device) for part, device in zip(np.split(padded, len(own)), own)]
  return jax.make_array_from_single_device_arrays((each * len(devices), *leaf.shape[1:]), spread, parts)


class _Pick(tuple):
  """The places in [N * c, ...] of each device's rows [N, b], and its columns: hashable, for the compiled program.

  A tuple (rows of device 0, ...), (first column of device 0, ...), number of columns; no columns are None.
  """

  @classmethod
  def of(
    cls,
    devices: Sequence[jax.Device],
    sources: Sequence[int],
    leaf: np.ndarray,
    sharding: NamedSharding,
    shape: Sequence[int],
  ) -> _Pick:
    """Reads it from the sharding of the global array."""
    own = collections.defaultdict(list)
    for number, device in enumerate(devices):
      own[device.process_index].append(number)
    each = _rows_per_device(devices, leaf)

    # Source i brings the rows i * R ... (i + 1) * R - 1.
    places = []
    for process in sources:
      slots = [number * each + row for number in own[process] for row in range(each)]
      places += slots[: len(leaf)]

    # A device that only brings rows picks some block, which nobody looks at.
    at = blocks(sharding, shape)
    picked = [at.get(device, at[devices[0]]) for device in devices]
    rows = tuple(tuple(places[slice(*block[0])]) for block in picked)
    if len(shape) == 1:
      return cls((rows, None, None))
    first, last = picked[0][1]
    return cls((rows, tuple(block[1][0] for block in picked), last - first))


def _rows_per_device(devices: Sequence[jax.Device], leaf: np.ndarray) -> int:
  """Returns c: so many that the rows fit on the devices of any process."""
  fewest = min(collections.Counter(device.process_index for device in devices).values())
  return -(-len(leaf) // fewest)


@functools.cache
def _pick(spread: NamedSharding, picks: tuple[_Pick, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
  """Returns the jitted program that gives every device its blocks of the arrays."""

  def local(arrays: list[jax.Array]) -> list[jax.Array]:
    device = jax.lax.axis_index(AXIS)
    picked = []
    # Every device sees all rows for a moment, field by field, and keeps its block.
    for array, (rows, columns, width) in zip(arrays, picks):
      everything = jax.lax.all_gather(array, AXIS, tiled=True)
      block = everything[jnp.asarray(rows)[device]]
      if columns is not None:
        block = jax.lax.dynamic_slice_in_dim(block, jnp.asarray(columns)[device], width, axis=1)
      picked.append(block)
    return picked

  specs = [spread.spec] * len(picks)
  return jax.jit(jax.shard_map(local, mesh=spread.mesh, in_specs=(specs,), out_specs=specs))


def everywhere(tree: Any, sharding: NamedSharding | None) -> Any:
  """Fetches global arrays to this host; with a replicated `sharding` also what lies on the devices of others."""
  if sharding is not None:
    tree = jax.jit(lambda arrays: arrays, out_shardings=sharding)(tree)
  return jax.device_get(tree)
