"""The devices of a run: which learn, which sample, and how the sampler's share is laid out."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from sao_jax.config import MeshConfig, RunConfig
from sao_jax.parallel.mesh import make_mesh


@dataclasses.dataclass(frozen=True)
class Devices:
  """The devices that learn and those that sample: the same ones (`shared`) or two sets of local ones (`split`)."""

  learner: tuple[Any, ...]
  sampler: tuple[Any, ...]


def local_devices() -> tuple[Any, ...]:
  """Returns the devices of this process."""
  return tuple(jax.local_devices())


def devices_by_process() -> list[tuple[Any, ...]]:
  """Returns the devices of all processes, in the order of these."""
  devices = jax.devices()
  return [
    tuple(device for device in devices if device.process_index == process) for process in range(jax.process_count())
  ]


def place(config: RunConfig) -> Devices:
  """Applies `rollout.placement`: with `split` the last `rollout.sampler_devices` local devices sample."""
  local = local_devices()
  hosts = [local] if jax.process_count() == 1 else devices_by_process()
  count = config.rollout.sampler_devices if config.rollout.placement == "split" else 0
  learner = tuple(device for devices in hosts for device in devices[: len(devices) - count])
  return Devices(learner, local[-count:])


def make_sampler_mesh(config: RunConfig, devices: tuple[Any, ...]) -> Mesh | None:
  """Makes the sampler's mesh: the learner's layout on shared devices, otherwise slots spread over its own devices.

  None for a single device, which needs no mesh.
  """
  if len(devices) == 1:
    return None
  alone = config.rollout.placement == "shared" and jax.process_count() == 1
  layout = config.mesh if alone else MeshConfig(data=-1, fsdp=1)
  return make_mesh(layout, devices)
