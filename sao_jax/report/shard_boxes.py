"""The parts of a sharded array as a picture: rectangles, with the devices that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sao_jax.report.style import GREY


def draw_shards(axes: Any, sharding: Any, shape: Sequence[int], dimensions: tuple[int, int]) -> None:
  """Draws two dimensions of an array, cut as its devices hold it; each part names its devices.

  Args:
    axes: matplotlib axes.
    sharding: a `jax.sharding.Sharding`.
    shape: the array's.
    dimensions: the one that is drawn from top to bottom, and the one from left to right.
  """
  from matplotlib import colormaps, patches  # an optional extra

  # The devices of each part: several hold the same one where the array is copied, or split in dimensions not drawn.
  holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
  for device, index in sharding.devices_indices_map(tuple(shape)).items():
    part = tuple(index[each].indices(shape[each])[:2] for each in dimensions)
    holders.setdefault(part, []).append(device.id)

  colors = colormaps["Set2"]
  for number, (((top, bottom), (left, right)), devices) in enumerate(sorted(holders.items())):
    box = (left, top), right - left, bottom - top
    axes.add_patch(patches.Rectangle(*box, facecolor=colors(number % colors.N), edgecolor="white", linewidth=1.5))
    text = ", ".join(map(str, sorted(devices)))
    axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", fontsize=8)

  # As a matrix is written: the first row at the top.
  axes.set_xlim(0, shape[dimensions[1]])
  axes.set_ylim(shape[dimensions[0]], 0)
  axes.grid(visible=False)
  axes.tick_params(colors=GREY, labelsize=7)
