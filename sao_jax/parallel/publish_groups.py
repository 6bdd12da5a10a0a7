"""Publishing between processes: from one mesh of learners to groups of samplers, each with a mesh of its own.

A group is the devices of one host, or of a few neighbouring ones, and holds a whole copy. No process may send arrays to
devices that it does not see, so every step is a program that all processes concerned run together: the groups become
one mesh with a leading axis `role`, over which parameters are replicated.

* Where the groups are the learner's own devices, one reshard to that mesh does it.
* Where others sample, the learner's devices form groups as well, of the same size, and stand in front of the samplers'
  on the axis. One program then copies entry 0 to all; what the samplers put in is zeros.

Leaves travel one after the other, so that beside the cast copy, which is split over all learners, no learner holds
more than one leaf in the layout of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sao_jax.parallel.params import Params

ROLE = "role"


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
    everywhere = jax.device_put(leaf, NamedSharding(stack(groups), spec))
    return on_mesh(everywhere, leaf.shape, NamedSharding(own, spec))

  # The learner's devices as groups: those in front, and entry 0 is what counts.
  fronts = learner_groups(learners, samplers, groups[0])
  whole = jax.device_put(leaf, NamedSharding(stack(fronts), spec))
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
