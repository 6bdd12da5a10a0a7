"""Meshes on the torus of a TPU pod: what it cannot hold is refused by name, and what it can is laid out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from toys.tpu_process import answer_of, needs_libtpu

from sao_jax.config import MeshConfig
from sao_jax.errors import ConfigError
from sao_jax.parallel.mesh import arrange, make_mesh

PROGRAM = """
import json
from jax.experimental import topologies
from sao_jax.config import MeshConfig
from sao_jax.errors import ConfigError
from sao_jax.parallel.mesh import make_mesh

devices_of = lambda name: list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
POD, CUBE, PLANE = (devices_of(name) for name in ("v5p:4x4x4", "v5p:2x2x2", "v5e:4x4"))

def answer(devices, **sizes):
  try:
    mesh = make_mesh(MeshConfig(**sizes), devices)
  except ConfigError as error:
    return [error.field, str(error)]
  assert len({device.id for device in mesh.devices.flat}) == len(devices)
  return list(mesh.devices.shape)

print(json.dumps({
  "fits": answer(POD, fsdp=16, expert=4),
  "refused": answer(POD, fsdp=8, expert=8),
  "split": answer(POD, fsdp=8, expert=8, allow_split_physical_axes=True),
  "plane": answer(PLANE, fsdp=8, tensor=2),
  "cube": answer(CUBE, data=2, fsdp=2, context=2),
  "no box": answer(CUBE[:3], fsdp=3),
  "half of the hosts": answer(POD[:32], fsdp=32),
}))
"""


@needs_libtpu
def test_meshes_on_topologies():
  answer = answer_of(PROGRAM)
  assert answer["fits"] == [1, 16, 4, 1, 1] and answer["split"] == [1, 8, 8, 1, 1]
  assert answer["cube"] == [2, 2, 1, 1, 2] and answer["half of the hosts"] == [1, 32, 1, 1, 1]

  field, message = answer["refused"]
  assert field == "mesh" and "fsdp=8, expert=8 does not fit a torus of 4x4x4" in message
  assert "1, 4, 16, 64. mesh.allow_split_physical_axes=True" in message
  assert "fsdp=8, tensor=2 does not fit a torus of 4x4" in answer["plane"][1] and "1, 4, 16." in answer["plane"][1]
  assert "3 devices are no box" in answer["no box"][1]


def test_data_alone_spans_slices():
  """Two slices of four devices: the outer half of "data" is the slice, and every other axis stays inside one."""
  devices = [
    SimpleNamespace(id=i, process_index=i // 4, slice_index=i // 4, platform="cpu", device_kind="cpu") for i in range(8)
  ]
  sizes = {"data": 4, "fsdp": 2, "expert": 1, "tensor": 1, "context": 1}
  slices = np.vectorize(lambda device: device.slice_index)(arrange(sizes, devices, False, "mesh"))
  assert slices.reshape(4, 2).tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
  with pytest.raises(ConfigError, match="data=1 over 2 slices") as error:
    make_mesh(MeshConfig(fsdp=8), devices)
  assert error.value.field == "mesh.data"
