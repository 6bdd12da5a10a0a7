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


def place(config: RunConfig) -> Devices:
  """Applies `rollout.placement`: with `split` the last `rollout.sampler_devices` local devices sample."""
  local = local_devices()
  if config.rollout.placement == "shared":
    return Devices(local, local)
  count = config.rollout.sampler_devices
  return Devices(local[:-count], local[-count:])


def make_sampler_mesh(config: RunConfig, devices: tuple[Any, ...]) -> Mesh | None:
  """Makes the sampler's mesh: the learner's layout on shared devices, otherwise slots spread over its own devices.

  None for a single device, which needs no mesh.
  """
  if len(devices) == 1:
    return None
  layout = config.mesh if config.rollout.placement == "shared" else MeshConfig(data=-1, fsdp=1)
  return make_mesh(layout, devices)
