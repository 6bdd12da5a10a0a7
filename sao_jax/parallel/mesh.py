"""The device mesh, and whether a model fits on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from sao_jax.config import MeshConfig
from sao_jax.errors import ConfigError
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.params import Specs, path_name

AXES = ("data", "fsdp", "expert", "tensor", "context")


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None, field: str = "mesh") -> Mesh:
  """A mesh with the axes `AXES` over all devices, or over those given; `field` is where the configuration stands.

  Neighbours on a mesh axis are neighbours on the torus of a TPU pod. Where the devices are several slices, "data" alone
  spans them: the network between slices is slow, and nothing but gradients travels over that axis.

  Raises:
    ConfigError: the sizes are not positive (one may be -1: what is left), their product is not the device count, or the
      torus has no such axes.
  """
  devices = list(jax.devices() if devices is None else devices)

  # Sizes are positive, but for one -1.
  sizes = {name: getattr(config, name) for name in AXES}
  fill = [name for name in AXES if sizes[name] == -1]
  for name in AXES:
    if sizes[name] < 1 and name not in fill:
      raise ConfigError(f"{field}.{name}", f"an axis cannot have {sizes[name]} devices.", "use a positive size or -1.")
  if len(fill) > 1:
    raise ConfigError(f"{field}.{fill[1]}", f"{' and '.join(fill)} are all -1.", "leave at most one axis at -1.")

  # The product is the number of devices.
  fixed = math.prod(size for size in sizes.values() if size > 0)
  if fill and len(devices) % fixed == 0:
    sizes[fill[0]] = len(devices) // fixed
  elif fill or fixed != len(devices):
    axes = ", ".join(f"{name}={sizes[name]}" for name in AXES)
    raise ConfigError(
      field, f"{axes} does not match {len(devices)} devices.", f"choose sizes whose product is {len(devices)}."
    )

  arranged = arrange(sizes, devices, config.allow_split_physical_axes, field)
  return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange(sizes: dict[str, int], devices: Sequence[Any], split_axes: bool, field: str) -> np.ndarray:
  """The devices in the order of a mesh of these sizes; `split_axes` is `mesh.allow_split_physical_axes`.

  Raises:
    ConfigError: the devices are no box of the torus, or no such axes fit it.
  """
  shape = tuple(sizes[name] for name in AXES)
  slices = len({slice_of(device) for device in devices})
  if sizes["data"] % slices:
    problem = f"data={sizes['data']} over {slices} slices; no other axis may cross the network between them."
    raise ConfigError(f"{field}.data", problem, f"make {field}.data a multiple of {slices}.")

  inside = (sizes["data"] // slices, *shape[1:])
  options = {"devices": devices, "allow_split_physical_axes": split_axes}
  try:
    if slices == 1:
      return mesh_utils.create_device_mesh(inside, **options)
    return mesh_utils.create_hybrid_device_mesh(inside, (slices, 1, 1, 1, 1), **options)
  except (NotImplementedError, AssertionError, ValueError) as error:
    raise _no_such_torus(sizes, devices, slices, split_axes, field) from error


def _no_such_torus(
  sizes: dict[str, int], devices: Sequence[Any], slices: int, split_axes: bool, field: str
) -> ConfigError:
  """The error for a mesh that jax cannot lay out, with the sizes that the torus of every slice can hold."""
  axes = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
  torus = torus_of([device for device in devices if slice_of(device) == slice_of(devices[0])])
  of = "x".join(map(str, torus))
  if math.prod(torus) * slices != len(devices):
    problem = f"{len(devices)} devices are no box of a TPU's torus, they lie in one of {of}."
    return ConfigError(field, problem, "use whole hosts that lie side by side, or all devices.")

  inside = f" inside each of {slices} slices" if slices > 1 else ""
  problem = f"{axes} does not fit a torus of {of}{inside}."
  if split_axes:
    return ConfigError(field, problem, "choose other sizes.")
  fits = ", ".join(map(str, axis_sizes(torus)))
  remedy = f"each size is a product of whole axes of the torus, none of them used twice: {fits}. "
  return ConfigError(field, problem, remedy + f"{field}.allow_split_physical_axes=True lets axes share links.")


def slice_of(device: Any) -> int:
  """The slice of a device; 0 where there is one alone."""
  return getattr(device, "slice_index", 0)


def torus_of(devices: Sequence[Any]) -> tuple[int, ...]:
  """The extent of TPU devices in each dimension, and the cores of a chip behind them where there are several."""
  coordinates = np.array([(*device.coords, device.core_on_chip) for device in devices])
  extent = coordinates.max(axis=0) - coordinates.min(axis=0) + 1
  return tuple(int(size) for size in (extent if extent[-1] > 1 else extent[:-1]))


def axis_sizes(torus: tuple[int, ...]) -> list[int]:
  """The sizes that a mesh axis may have: products of whole axes of the torus.

  >>> axis_sizes((4, 4, 8))
  [1, 4, 8, 16, 32, 128]
  """
  sizes = {1}
  for extent in torus:
    sizes |= {size * extent for size in sizes}
  return sorted(sizes)


def check_mesh_divides_model(layout: Layout, specs: Specs, field: str = "mesh") -> None:
  """Refuses a mesh that cannot split some parameter evenly; `field` is where its configuration stands.

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
          f"{field}.{'*'.join(axis for axis in layout.rules.mesh_axes(logical) if layout.mesh.shape[axis] > 1)}",
          f"{parts} devices cannot split the {logical!r} axis of {name}, which has size {size}.",
          f"choose a mesh size that divides {size}, or change the model.",
        )
