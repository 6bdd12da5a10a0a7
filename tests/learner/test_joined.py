"""Train steps of several processes on the loopback equal those of one on the same trajectories."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from toys import processes
from toys.joined_steps import train_steps
from toys.paths import TESTS

SCRIPT = str(TESTS / "toys" / "joined_steps.py")
# The fifth step has shorter rows: one more program, which every process compiles for every mesh. One of them will do.
THREE_STEPS, FIVE_STEPS = [[16, 32]] * 3, [[16, 32]] * 4 + [[16, 16]]


@pytest.fixture(scope="module")
def alone():
  """What one process has after three steps, and after five."""
  return train_steps({"fsdp": 4}, 3, 5, devices=tuple(jax.devices()[:4]), heldout=True)


def joined(folder, count, devices, *runs):
  """What process 0 of `count` has after so many steps on each of the meshes."""
  command = [SCRIPT, str(folder / "out"), json.dumps(runs)]
  ended = processes.finish_joined(processes.start_joined(count, command, folder, devices=devices), folder)
  assert [status for status, _ in ended] == [0] * count, ended
  return [dict(np.load(folder / f"out{number}.npz")) for number in range(len(runs))]


def assert_equal(result, expected, shapes):
  assert result.keys() == expected.keys() and len(result) > 20
  for name in expected.keys() - {"shapes"}:
    np.testing.assert_allclose(result[name], expected[name], rtol=0, atol=1e-6, err_msg=name)
  assert result["shapes"].tolist() == shapes  # what the process with the long ones needs


@pytest.mark.timeout(600)
def test_two_processes_equal_one_also_where_every_row_lies_on_both(tmp_path, alone):
  after_three, after_five = alone
  own_rows, shared_rows = joined(
    tmp_path, 2, 2, ({"data": 2, "fsdp": 2}, 5, True), ({"fsdp": 1, "context": 4}, 3, False)
  )
  assert_equal(own_rows, after_five, FIVE_STEPS)
  assert_equal(shared_rows, after_three, THREE_STEPS)


@pytest.mark.timeout(600)
def test_four_processes_equal_one_with_a_row_on_two_of_them(tmp_path, alone):
  (result,) = joined(tmp_path, 4, 1, ({"fsdp": 2, "tensor": 2}, 3, False))
  assert_equal(result, alone[0], THREE_STEPS)
