"""The picture of a sharded array has its parts, each with its devices."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sao_jax.report.shard_boxes import draw_shards

pytest.importorskip("matplotlib")


class Four:
  """Four devices that hold the two halves of the columns, of each row twice."""

  def devices_indices_map(self, shape):
    half = shape[1] // 2
    columns = [slice(None, half), slice(None, half), slice(half, None), slice(half, None)]
    return {Device(number): (slice(None), each, slice(None)) for number, each in enumerate(columns)}


class Device:
  def __init__(self, number):
    self.id = number


def drawn(sharding, shape, dimensions):
  from matplotlib.figure import Figure

  axes = Figure().add_subplot()
  draw_shards(axes, sharding, shape, dimensions)
  boxes = [(patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()) for patch in axes.patches]
  return dict(zip((text.get_text() for text in axes.texts), boxes, strict=True))


def test_parts_lie_where_their_indices_say_and_name_their_devices():
  assert drawn(Four(), (6, 8, 3), (0, 1)) == {"0, 1": (0, 0, 4, 6), "2, 3": (4, 0, 4, 6)}
  assert drawn(Four(), (6, 8, 3), (1, 2)) == {"0, 1": (0, 0, 3, 4), "2, 3": (0, 4, 3, 4)}


def test_dimensions_that_are_not_split_are_one_part_of_all_devices():
  assert drawn(Four(), (6, 8, 3), (0, 2)) == {"0, 1, 2, 3": (0, 0, 3, 6)}


def test_a_sharding_of_jax_is_drawn():
  mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
  assert drawn(NamedSharding(mesh, PartitionSpec("data")), (4, 2), (0, 1)) == {"0": (0, 0, 2, 4)}
