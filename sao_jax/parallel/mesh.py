"""The device mesh, and whether a model fits on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from sao_jax.config import MeshConfig
from sao_jax.errors import ConfigError
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.params import Specs, path_name

AXES = ("data", "fsdp", "expert", "tensor", "context")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh with the axes `AXES` over all devices, or over those given.

  Raises:
    ConfigError: the sizes are not positive (one may be -1: what is left), or their product is not the device count.
  """
  devices = list(jax.devices() if devices is None else devices)

  # Sizes are positive, but for one -1.
  sizes = dataclasses.asdict(config)
  fill = [name for name in AXES if sizes[name] == -1]
  for name in AXES:
    if sizes[name] < 1 and name not in fill:
      raise ConfigError(f"mesh.{name}", f"an axis cannot have {sizes[name]} devices.", "use a positive size or -1.")
  if len(fill) > 1:
    raise ConfigError(f"mesh.{fill[1]}", f"{' and '.join(fill)} are all -1.", "leave at most one axis at -1.")

  # The product is the number of devices.
  fixed = math.prod(size for size in sizes.values() if size > 0)
  if fill and len(devices) % fixed == 0:
    sizes[fill[0]] = len(devices) // fixed
  elif fill or fixed != len(devices):
    axes = ", ".join(f"{name}={sizes[name]}" for name in AXES)
    raise ConfigError(
      "mesh", f"{axes} does not match {len(devices)} devices.", f"choose sizes whose product is {len(devices)}."
    )

  shape = tuple(sizes[name] for name in AXES)
  return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def check_mesh_divides_model(layout: Layout, specs: Specs) -> None:
  """Refuses a mesh that cannot split some parameter evenly.

  Raises:
    ConfigError: naming the mesh axes, the parameter and its size; or two of its dimensions that share a mesh axis.
  """
  for path, spec in jax.tree_util.tree_leaves_with_path(specs):
    name = path_name(path)
    layout.spec(*spec.axes, name=name)
    for size, logical in zip(spec.shape, spec.axes, strict=True):
      parts = layout.shards(logical)
      if size % parts:
        raise ConfigError(
          f"mesh.{'*'.join(axis for axis in layout.rules.mesh_axes(logical) if layout.mesh.shape[axis] > 1)}",
          f"{parts} devices cannot split the {logical!r} axis of {name}, which has size {size}.",
          f"choose a mesh size that divides {size}, or change the model.",
        )
