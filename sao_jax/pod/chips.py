"""Figures of TPU chips, per device as jax counts them, and the devices of a topology that is not here.

Peak FLOP/s, HBM sizes and their bandwidths are published at https://docs.cloud.google.com/tpu/docs (v5e, v5p, v6e,
tpu7x); of HBM, the compiler leaves a program what it itself says when one does not fit. The bandwidth of a link is that
of https://jax-ml.github.io/scaling-book/tpus, about 90 % of the published one; of tpu7x, as of v5p. A tpu7x chip is two
devices, which share its links.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from sao_jax.errors import ConfigError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """One kind of device.

  Attributes:
    name: as in the name of a topology.
    flops: peak FLOP/s of bf16 products.
    hbm: bytes of main memory that a program may use.
    hbm_bandwidth: bytes/s.
    link_bandwidth: bytes/s that one link sends; along each axis of the torus a device has two.
    torus: the number of axes of the torus.
    ring: sizes along an axis of the torus are rings, and not lines, where they are a multiple of this.
  """

  name: str
  flops: float
  hbm: int
  hbm_bandwidth: float
  link_bandwidth: float
  torus: int
  ring: int


CHIPS = {
  "v5e": Chip("v5e", 197e12, int(15.75 * GIB), 819e9, 45e9, 2, 16),
  "v5p": Chip("v5p", 459e12, int(95.74 * GIB), 2765e9, 90e9, 3, 4),
  "v6e": Chip("v6e", 918e12, int(31.25 * GIB), 1640e9, 90e9, 2, 16),
  "tpu7x": Chip("tpu7x", 2307e12 / 2, int(94.75 * GIB), 7380e9 / 2, 45e9, 3, 4),
}

# What a process needs, that compiles for a TPU and has none. libtpu refuses flags of XLA that it does not know.
ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "XLA_FLAGS": "",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_MIN_LOG_LEVEL": "3",
  "TF_CPP_MIN_LOG_LEVEL": "3",
}


def chip_of(topology: str) -> Chip:
  """Returns the chip of a topology, as of "v5p:4x4x4".

  Raises:
    ConfigError: the name is not one of a known chip with sizes.
  """
  name = topology.partition(":")[0]
  if name not in CHIPS or not re.fullmatch(r"\w+:\d+(x\d+)+", topology):
    raise ConfigError(
      "--topology", f"{topology!r} is no topology.", f"Name one of {', '.join(CHIPS)} with sizes, as in v5p:4x4x4."
    )
  return CHIPS[name]


@functools.cache  # jax makes other devices of the same topology each time
def topology_devices(topology: str) -> tuple[Any, ...]:
  """Returns the devices of a topology, which compile but do not run. The process needs `ENVIRONMENT`.

  Raises:
    ConfigError: there is no libtpu, or it knows no such topology.
  """
  from jax.experimental import topologies

  chip_of(topology)
  wrong = [name for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY") if os.environ.get(name) != ENVIRONMENT[name]]
  if wrong:
    raise ConfigError("environment", f"{wrong[0]} must be {ENVIRONMENT[wrong[0]]}.", "Use `launch.compile_pod`.")
  try:
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
  except Exception as error:  # jax raises errors of several kinds, and its runtime another one
    remedy = 'pip install "sao_jax[aot]", and choose sizes that such a slice can have, as v5p:4x4x4 or v6e:16x16.'
    raise ConfigError("--topology", f"{topology}: {str(error).splitlines()[0]}", remedy) from error


def topology_of(chip: Chip, count: int) -> str:
  """Names the smallest box of so many devices: with sizes that are equal or nearly equal.

  >>> topology_of(CHIPS["v5p"], 4), topology_of(CHIPS["v5p"], 64), topology_of(CHIPS["v6e"], 8)
  ('v5p:2x2x1', 'v5p:4x4x4', 'v6e:2x4')
  """
  chips = count // 2 if chip.name == "tpu7x" else count
  sizes = [1] * chip.torus
  while math.prod(sizes) < chips:
    smallest = min(range(chip.torus), key=lambda axis: (sizes[axis], axis))
    sizes[smallest] *= 2
  return f"{chip.name}:{'x'.join(map(str, sorted(sizes, key=lambda size: (size == 1, size))))}"


def axis_bandwidth(mesh: Mesh, axes: Sequence[str], chip: Chip) -> float:
  """Returns the bytes/s that a device sends along mesh axes: over all links of the torus axes on which they lie.

  A ring sends both ways; a line has one way for most of its length.
  """
  if not any(mesh.shape[axis] > 1 for axis in axes if axis in mesh.shape):
    return 2.0 * chip.link_bandwidth
  places = {name: number for number, name in enumerate(mesh.axis_names)}
  along = tuple(slice(None) if name in axes else 0 for name in places)
  members = [device.coords for device in mesh.devices[along].reshape(-1)]
  whole = [device.coords for device in mesh.devices.reshape(-1)]

  total = 0.0
  for axis in range(chip.torus):
    used = {place[axis] for place in members}
    if len(used) > 1:
      size = 1 + max(place[axis] for place in whole)
      total += chip.link_bandwidth * (2 if size % chip.ring == 0 else 1)
  return total or 2.0 * chip.link_bandwidth  # two devices on one chip
