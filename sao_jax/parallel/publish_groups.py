"""Publishing between processes: from one mesh of learners to groups of samplers, each with a mesh of its own.

A group is the devices of one host, or of a few neighbouring ones, and holds a whole copy. No process may send arrays to
devices that it does not see, so every step is a program that all processes concerned run together: the groups become
one mesh with a leading axis `role`, over which parameters are replicated.

* Where the groups are the learner's own devices, the relayout to that mesh does it.
* Where others sample, the learner's devices form groups as well, of the same size.
  Those that share a process with a sampler hand it their copy.
  Elsewhere they stand in front of the samplers' on the axis, and one program copies entry 0 to all; what the samplers
  put in is zeros.

Memory, in the dtype of the copy, which is 2 bytes a parameter in bf16. Every learner holds its share of the cast copy,
split over all of them, and leaves go one after the other: a group that learns and samples holds nothing else but its
own copy, which it keeps, and the copy that its sampler still reads. A relayout for which XLA finds no better way
gathers all that it reads on every device. So large leaves, those of all layers, go a few layers at a time inside of
their program: at worst a device needs room for about three pieces of `PIECE` bytes. Learners beside samplers hold one
leaf in the layout of a group, those in front of others two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sao_jax.parallel.params import Params

ROLE = "role"
PIECE = 2**29  # bytes; what is gathered at a time, unless a single layer of a leaf has more


def make_group_publish(
  target_shardings: Any, groups: Sequence[Mesh], shapes: Params | None
) -> Callable[[Params | None], Params | None]:
  """Returns `publish(copy)`, which brings the learner's `copy` to every group; all processes call it.

  A process that learns only gets None back. One that samples only passes None.

  Args:
    target_shardings: tree of `NamedSharding`s on any of the groups' meshes; their specs hold on all.
    groups: meshes of the same axes and sizes.
    shapes: shapes and dtypes of the copy; None where this process learns.
  """
  specs = [sharding.spec for sharding in jax.tree.leaves(target_shardings)]
  here = jax.process_index()
  own = next((mesh for mesh in groups if any(device.process_index == here for device in mesh.devices.flat)), None)

  def publish(copy: Params | None) -> Params | None:
    leaves, tree = jax.tree.flatten(shapes if copy is None else copy)
    move = receive if copy is None else send
    del copy  # a leaf that has been sent is freed

    received = [move(leaves.pop(0), spec, groups, own) for spec in specs]
    return None if own is None else jax.tree.unflatten(tree, received)

  return publish


def send(leaf: jax.Array, spec: PartitionSpec, groups: Sequence[Mesh], own: Mesh | None) -> jax.Array | None:
  """Brings one leaf of the learner to all groups, and returns the copy of the own group, if there is one."""
  learners = set(leaf.sharding.device_set)
  samplers = {device for mesh in groups for device in mesh.devices.flat}
  if learners == samplers:
    everywhere = relayout(leaf, NamedSharding(stack(groups), spec))
    return on_mesh(everywhere, leaf.shape, NamedSharding(own, spec))

  # The learner's devices as groups. A sampler of this process takes the copy of one beside it.
  fronts = learner_groups(learners, samplers, groups[0])
  whole = relayout(leaf, NamedSharding(stack(fronts), spec))
  if own is not None:
    beside = next(front for front in fronts if processes_of(front) == processes_of(own))
    return jax.device_put(on_mesh(whole, leaf.shape, NamedSharding(beside, spec)), NamedSharding(own, spec))

  # Samplers elsewhere: the learner's groups stand in front, and entry 0 is what counts.
  entries = with_role(stack(fronts), spec, len(fronts))(whole)
  spread(entries, spec, (*fronts, *groups))
  return None


def receive(shape: jax.ShapeDtypeStruct, spec: PartitionSpec, groups: Sequence[Mesh], own: Mesh) -> jax.Array:
  """Takes part in `send` for a process that samples only, and returns the copy of its group."""
  samplers = {device for mesh in groups for device in mesh.devices.flat}
  learners = {device for device in jax.devices() if device not in samplers}
  fronts = learner_groups(learners, samplers, groups[0])
  entries = zeros(stack(groups), spec, (len(groups), *shape.shape), shape.dtype)()
  received = spread(entries, spec, (*fronts, *groups))

  # The entry of the own group loses its leading axis.
  entry = on_mesh(received, (1, *shape.shape), NamedSharding(stack([own]), PartitionSpec(ROLE, *spec)))
  return first_entry(own, spec)(entry)


def spread(entries: jax.Array, spec: PartitionSpec, roles: Sequence[Mesh]) -> jax.Array:
  """Copies entry 0 of all roles to the others; `entries` are those that this process has a part in."""
  sharding = NamedSharding(stack(roles), PartitionSpec(ROLE, *spec))
  shape = (len(roles), *entries.shape[1:])
  return broadcast(sharding)(on_mesh(entries, shape, sharding))


def relayout(leaf: jax.Array, target: NamedSharding) -> jax.Array:
  """The same array in another layout over the same devices, which another mesh may have in another order."""
  # Parts first go, as they are, to where the target's order of the devices has them: a permutation.
  mesh = leaf.sharding.mesh
  ordered = Mesh(target.mesh.devices.reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)
  leaf = jax.device_put(leaf, NamedSharding(ordered, leaf.sharding.spec))

  # Then they are exchanged, layers by layers if neither layout splits the leading dimension.
  whole = all(not sharding.spec or sharding.spec[0] is None for sharding in (leaf.sharding, target))
  pieces = pieces_of(leaf, PIECE) if whole and leaf.ndim > 1 else 1
  return exchange(halfway(leaf, target), target, pieces)(leaf)


def halfway(leaf: jax.Array | jax.ShapeDtypeStruct, target: NamedSharding) -> NamedSharding:
  """The layout of the target with one more dimension over `role`: the one that `leaf` splits most.

  From there a gather over `role` is left. On the way there devices exchange parts with those of their group, which XLA
  does not find by itself. Where the dimension does not divide, it is the target.
  """
  parts = [whole // part for whole, part in zip(leaf.shape, leaf.sharding.shard_shape(leaf.shape), strict=True)]
  if max(parts, default=1) == 1:
    return target
  spec, dimension = [*target.spec, *(None,) * (leaf.ndim - len(target.spec))], parts.index(max(parts))
  axes = spec[dimension] if isinstance(spec[dimension], tuple) else (spec[dimension],)
  spec[dimension] = (ROLE, *(axis for axis in axes if axis is not None))
  divides = leaf.shape[dimension] % math.prod(target.mesh.shape[axis] for axis in spec[dimension]) == 0
  return NamedSharding(target.mesh, PartitionSpec(*spec)) if divides else target


def pieces_of(leaf: jax.Array | jax.ShapeDtypeStruct, size: int) -> int:
  """Into how many pieces the leading dimension divides, so that each has at most `size` bytes, if it can.

  >>> pieces_of(jax.ShapeDtypeStruct((48, 1024), "bfloat16"), 10_000)
  12
  """
  layers = leaf.shape[0]
  fitting = (n for n in range(1, layers + 1) if layers % n == 0 and leaf.size * leaf.dtype.itemsize <= n * size)
  return next(fitting, max(layers, 1))


def processes_of(mesh: Mesh) -> set[int]:
  """The processes that a mesh has devices of."""
  return {device.process_index for device in mesh.devices.flat}


def learner_groups(learners: set[jax.Device], samplers: set[jax.Device], like: Mesh) -> list[Mesh]:
  """The learner's devices as meshes like those of the samplers, host by host."""
  if learners & samplers or len(learners) % like.size:
    raise ValueError(
      f"{len(learners)} learning and {len(samplers)} sampling devices, {len(learners & samplers)} of them the same, in "
      f"groups of {like.size}: either all are the same, or none, and learners are a whole number of groups"
    )
  ordered = sorted(learners, key=lambda device: (device.process_index, device.id))
  blocks = np.array(ordered).reshape(-1, *like.devices.shape)
  return [Mesh(block, like.axis_names, axis_types=like.axis_types) for block in blocks]


def stack(groups: Sequence[Mesh]) -> Mesh:
  """One mesh of all groups, with the leading axis `role`."""
  devices = np.stack([mesh.devices for mesh in groups])
  return Mesh(devices, (ROLE, *groups[0].axis_names), axis_types=(AxisType.Auto,) * devices.ndim)


def on_mesh(array: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
  """The array of another mesh whose parts are those that `array` has on its devices of this process."""
  parts = [shard.data for shard in array.addressable_shards if shard.device in sharding.device_set]
  return jax.make_array_from_single_device_arrays(shape, sharding, parts)


# Programs, compiled once for every shape.


@functools.cache
def exchange(between: NamedSharding, target: NamedSharding, pieces: int) -> Callable[[jax.Array], jax.Array]:
  """Brings a leaf by one layout into another, `pieces` of its leading dimension one after the other."""

  def exchange_piece(part: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(part, between), target)

  def exchange_pieces(leaf: jax.Array) -> jax.Array:
    parts = leaf.reshape(pieces, -1, *leaf.shape[1:])
    return jax.lax.map(exchange_piece, parts).reshape(leaf.shape)

  return jax.jit(exchange_pieces if pieces > 1 else exchange_piece, out_shardings=target)


@functools.cache
def with_role(mesh: Mesh, spec: PartitionSpec, count: int) -> Callable[[jax.Array], jax.Array]:
  """Gives a leaf that all groups hold an axis `role`."""
  sharding = NamedSharding(mesh, PartitionSpec(ROLE, *spec))
  return jax.jit(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), out_shardings=sharding)


@functools.cache
def zeros(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...], dtype: Any) -> Callable[[], jax.Array]:
  """Makes what a sampler puts in."""
  return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=NamedSharding(mesh, PartitionSpec(ROLE, *spec)))


@functools.cache
def broadcast(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
  """Copies entry 0 over the axis `role`."""
  return jax.jit(lambda x: jnp.broadcast_to(x[:1], x.shape), out_shardings=sharding, donate_argnums=0)


@functools.cache
def first_entry(mesh: Mesh, spec: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
  """Takes the leading axis away again."""
  return jax.jit(lambda x: x[0], out_shardings=NamedSharding(mesh, spec), donate_argnums=0)
