"""Gathers and reduce-scatters in stages, each over a part of the chips that is a torus of its own.

Over all chips of a torus at once, a TPU adds up in place of both: twice the bytes, and a sum as large as the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh


class Stage(NamedTuple):
  """One step of a gather: over a mesh axis, or within these groups of its indices."""

  axis: str
  groups: tuple[tuple[int, ...], ...] | None = None


def stages(mesh: Mesh, axes: Sequence[str]) -> tuple[Stage, ...]:
  """The steps of a gather over `axes`, the outermost first: each axis by itself, one that covers all chips in two."""
  steps = []
  for axis in axes:
    size, devices = mesh.shape[axis], mesh.devices.flat
    whole_torus = size == mesh.size and devices[0].platform == "tpu"
    line = line_length([device.coords for device in devices]) if whole_torus else size
    steps += halves(axis, size, line) if 1 < line < size and size % line == 0 else [Stage(axis)]
  return tuple(steps)


def halves(axis: str, size: int, line: int) -> tuple[Stage, Stage]:
  """An axis as `line` neighbours within each of size / line blocks: first across the blocks, then within them.

  >>> halves("fsdp", 4, 2)[0].groups
  ((0, 2), (1, 3))
  """
  across = tuple(tuple(range(place, size, line)) for place in range(line))
  within = tuple(tuple(range(start, start + line)) for start in range(0, size, line))
  return Stage(axis, across), Stage(axis, within)


def gather(x: jax.Array, steps: Sequence[Stage], dimension: int) -> jax.Array:
  """The whole `dimension` of an array that the axes of `steps` split, inside `jax.shard_map`."""
  for axis, groups in reversed(steps):
    x = jax.lax.all_gather(x, axis, axis=dimension, tiled=True, axis_index_groups=groups)
  return x


def scatter_sum(x: jax.Array, steps: Sequence[Stage], dimension: int) -> jax.Array:
  """This device's part of the sum over the axes of `steps`; the transpose of `gather`."""
  for axis, groups in steps:
    x = jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True, axis_index_groups=groups)
  return x


def line_length(places: Sequence[tuple[int, ...]]) -> int:
  """The number of chips, from the first one on, that follow each other along one dimension of the torus.

  >>> line_length([(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)])
  3
  """
  changed = lambda place: [i for i, (here, first) in enumerate(zip(place, places[0], strict=True)) if here != first]
  line = 1
  while line < len(places) and len(changed(places[line])) == 1 and changed(places[line]) == changed(places[1]):
    line += 1
  return line
