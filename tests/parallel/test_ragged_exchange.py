"""Rows to other devices, a different number to each: the definition, as a loop in numpy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from sao_jax.parallel.ragged_exchange import exchange_rows, ragged_exchange


def by_loop(operand, output, input_offsets, send_sizes, output_offsets):
  result = output.copy()
  for sender in range(len(operand)):
    for receiver in range(len(operand)):
      start, size = input_offsets[sender, receiver], send_sizes[sender, receiver]
      place = output_offsets[sender, receiver]
      result[receiver, place : place + size] = operand[sender, start : start + size]
  return result


def run(sizes, *arrays):
  """On one device per sender; `sizes` are those of the mesh axes."""
  names = ("a", "b")[: len(sizes)]
  mesh = jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
  shard = lambda *own: exchange_rows(*(array[0] for array in own), axis_name=names)[None]
  spec = jax.sharding.PartitionSpec(names)
  mapped = jax.shard_map(shard, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec, check_vma=False)
  return np.asarray(jax.jit(mapped)(*arrays))


def test_the_example_of_jax():
  """The one in the documentation of jax.lax.ragged_all_to_all."""
  operand, output = np.array([[1, 2, 2], [3, 4, 0]]), np.zeros((2, 4), np.int64)
  slices = [[[0, 1], [0, 1]], [[1, 2], [1, 1]], [[0, 0], [1, 2]], [[1, 1], [2, 1]]]
  got = run((2,), operand, output, *map(np.array, slices))
  np.testing.assert_array_equal(got, [[1, 3, 0, 0], [2, 2, 4, 0]])


def test_any_sizes_over_two_axes_equal_the_loop():
  """Slices lie in any order, some are empty, and what is not received stays."""
  rng = np.random.default_rng(0)
  devices, room = 8, 40
  sizes = rng.integers(0, 6, (devices, devices)) * (rng.random((devices, devices)) > 0.3)
  operand = rng.normal(size=(devices, 60, 3)).astype(np.float32)
  output = rng.normal(size=(devices, room, 3)).astype(np.float32)
  starts = np.cumsum(sizes, axis=1) - sizes + rng.integers(0, 5, (devices, 1))
  order = rng.permutation(devices)  # in which the senders' rows stand at a receiver
  places = np.zeros_like(sizes)
  places[order] = np.cumsum(sizes[order], axis=0) - sizes[order]
  got = run((2, 4), operand, output, starts, sizes, places, sizes.T)
  np.testing.assert_array_equal(got, by_loop(operand, output, starts, sizes, places))


@pytest.mark.parametrize(("platform", "expected"), [("tpu", jax.lax.ragged_all_to_all), ("cpu", exchange_rows)])
def test_the_collective_of_a_platform(platform, expected):
  assert ragged_exchange(platform) is expected
