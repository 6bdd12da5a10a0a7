"""The devices of a run: which learn, which sample, in which groups, and how a group's share is laid out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from sao_jax.config import MeshConfig, RunConfig
from sao_jax.errors import ConfigError
from sao_jax.parallel.layout import SAMPLER_RULES, Layout
from sao_jax.parallel.mesh import check_mesh_divides_model, make_mesh, torus_of
from sao_jax.parallel.params import Specs
from sao_jax.parallel.process import DataShare
from sao_jax.sampler.buckets import check_slots


@dataclasses.dataclass(frozen=True)
class Devices:
  """The devices that learn, and those that sample: the same ones (`shared`), or two sets (`split`).

  Attributes:
    learner: one mesh spans them, over all processes.
    groups: those of every sampler; each holds a whole copy of the policy.
    process: the index of this process.
  """

  learner: tuple[Any, ...]
  groups: tuple[tuple[Any, ...], ...]
  process: int = 0

  @property
  def learns(self) -> bool:
    """True if this process has a part in the learner."""
    return any(device.process_index == self.process for device in self.learner)

  @property
  def sampler(self) -> tuple[Any, ...]:
    """The devices of the group that this process belongs to, () if it only learns."""
    own = lambda group: any(device.process_index == self.process for device in group)
    return next((group for group in self.groups if own(group)), ())

  @property
  def samples(self) -> bool:
    """True if this process has a part in a sampler."""
    return bool(self.sampler)

  @property
  def follows(self) -> bool:
    """True if this process has a part in a sampler that another process leads."""
    return self.samples and self.process not in self.sources

  @property
  def group(self) -> int | None:
    """The number of the group that this process belongs to."""
    return self.groups.index(self.sampler) if self.samples else None

  @property
  def apart(self) -> bool:
    """True if some processes only sample, and others learn."""
    return bool({device.process_index for group in self.groups for device in group} - self._learning)

  @property
  def sources(self) -> tuple[int, ...]:
    """The processes that bring data, one for each sampler: the first of its group."""
    return tuple(group[0].process_index for group in self.groups)

  @property
  def share(self) -> DataShare:
    """The share of the data that this process brings."""
    index = self.sources.index(self.process) if self.process in self.sources else None
    return DataShare(index, len(self.sources))

  @property
  def _learning(self) -> set[int]:
    return {device.process_index for device in self.learner}


def local_devices() -> tuple[Any, ...]:
  """Returns the devices of this process."""
  return tuple(jax.local_devices())


def devices_by_process() -> list[tuple[Any, ...]]:
  """Returns the devices of all processes, in the order of these."""
  if jax.process_count() == 1:
    return [local_devices()]
  devices = jax.devices()
  return [
    tuple(device for device in devices if device.process_index == process) for process in range(jax.process_count())
  ]


def place(config: RunConfig) -> Devices:
  """Applies `rollout.placement` to the devices of the run.

  Raises:
    ConfigError: as `divide`, and for samplers of several hosts that learn as well: every train step would have to wait
      for its turn among their programs.
  """
  rollout, several = config.rollout, jax.process_count() > 1
  apart = rollout.placement == "split" and rollout.sampler_hosts
  if rollout.hosts_per_sampler > 1 and several and not apart:
    problem = f"{rollout.hosts_per_sampler} hosts that learn cannot hold one sampler together."
    remedy = "Set hosts apart with rollout.placement=split and rollout.sampler_hosts, or leave it at 1."
    raise ConfigError("rollout.hosts_per_sampler", problem, remedy)
  return divide(config, [device for host in devices_by_process() for device in host], jax.process_index())


def divide(config: RunConfig, devices: Sequence[Any], process: int) -> Devices:
  """Returns who learns and who samples, the same for every process.

  * `shared`: all devices learn; every host, or `rollout.hosts_per_sampler` neighbouring ones together, sample too.
  * `split`: the last `rollout.sampler_devices` of every host sample, the others learn.
  * `split` with `rollout.sampler_hosts`: the last hosts sample, in groups of `rollout.hosts_per_sampler`.

  Args:
    config: of the run.
    devices: all of them.
    process: the index of this process.

  Raises:
    ConfigError: hosts, or the learners of one of several, do not divide into groups; one side has none, or is no box of
      the torus.
  """
  rollout = config.rollout
  hosts = [
    tuple(device for device in devices if device.process_index == index)
    for index in sorted({device.process_index for device in devices})
  ]
  if rollout.placement == "shared":
    return Devices(tuple(devices), _groups(hosts, rollout.hosts_per_sampler), process)

  # Hosts are set apart, or each divides its own devices.
  if rollout.sampler_hosts and len(hosts) > 1:
    field, count = "rollout.sampler_hosts", rollout.sampler_hosts
    _check_sides(field, count, len(hosts), "hosts")
    learner = tuple(device for host in hosts[:-count] for device in host)
    groups = _groups(hosts[-count:], rollout.hosts_per_sampler)
    if len(learner) % len(groups[0]):
      problem = f"{len(hosts) - count} hosts learn, which are no whole number of groups of {rollout.hosts_per_sampler}."
      raise ConfigError(field, problem, "Let rollout.hosts_per_sampler divide the number of learning hosts.")
  else:
    field, count = "rollout.sampler_devices", rollout.sampler_devices
    _check_sides(field, count, min(map(len, hosts)), "devices of a host")
    learner = tuple(device for host in hosts for device in host[:-count])
    groups = tuple(host[-count:] for host in hosts)
    rest = next((len(host) - count for host in hosts if (len(host) - count) % count), None)
    if len(hosts) > 1 and rest is not None:
      problem = f"{rest} devices of a host learn, which are no whole number of groups of the {count} that sample."
      raise ConfigError(field, problem, "Let it divide the number of learning devices of every host.")

  for side, members in (("learn", learner), *(("sample", group) for group in groups)):
    if members[0].platform == "tpu" and math.prod(torus_of(members)) != len(members):
      problem = f"the {len(members)} devices that {side} are no box of the torus, no mesh can be laid over them."
      raise ConfigError(field, problem, "Divide them into halves or quarters.")
  return Devices(learner, groups, process)


def _groups(hosts: Sequence[tuple[Any, ...]], size: int) -> tuple[tuple[Any, ...], ...]:
  """Neighbouring hosts together, `size` of them."""
  if len(hosts) % size:
    problem = f"{len(hosts)} hosts that sample do not divide into groups of {size}."
    raise ConfigError("rollout.hosts_per_sampler", problem, f"Choose a divisor of {len(hosts)}.")
  blocks = [hosts[start : start + size] for start in range(0, len(hosts), size)]
  return tuple(tuple(device for host in block for device in host) for block in blocks)


def _check_sides(field: str, count: int, of: int, what: str) -> None:
  if not 0 < count < of:
    remedy = "With placement='split' leave at least one to each side, or use placement='shared'."
    raise ConfigError(field, f"{count} of {of} {what} would sample.", remedy)


def make_sampler_mesh(config: RunConfig, devices: tuple[Any, ...]) -> Mesh | None:
  """Makes the mesh of a group of samplers: `sampler.mesh`; without it the learner's layout on the learner's devices.

  On devices of its own, or one host of several, slots are spread. None for a single device, which needs no mesh.
  """
  if len(devices) == 1:
    return None
  if config.sampler.mesh is not None:
    return make_mesh(config.sampler.mesh, devices, "sampler.mesh")
  shared = config.rollout.placement == "shared" and jax.process_count() == 1
  return make_mesh(config.mesh if shared else MeshConfig(data=-1, fsdp=1), devices)


def check_sampler_mesh(config: RunConfig, specs: Specs) -> None:
  """Refuses a `sampler.mesh` that does not hold the policy or the slots, before anything is compiled.

  Raises:
    ConfigError: naming the field.
  """
  devices = place(config).groups[0]
  mesh = None if config.sampler.mesh is None else make_sampler_mesh(config, devices)
  if mesh is not None:
    layout = Layout(mesh, SAMPLER_RULES)
    check_mesh_divides_model(layout, specs, "sampler.mesh")
    check_slots(config.sampler, layout.shards("slots"))
