"""Train steps of several processes on the loopback equal those of one on the same trajectories."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from toys import processes
from toys.joined_steps import five_steps
from toys.paths import TESTS

SCRIPT = str(TESTS / "toys" / "joined_steps.py")


@pytest.fixture(scope="module")
def alone():
  return five_steps({"fsdp": 4}, tuple(jax.devices()[:4]))


def joined(folder, count, devices, *meshes):
  """What process 0 of `count` has after five steps on each of the meshes."""
  command = [SCRIPT, str(folder / "out"), json.dumps(meshes)]
  ended = processes.finish_joined(processes.start_joined(count, command, folder, devices=devices), folder)
  assert [status for status, _ in ended] == [0] * count, ended
  return [dict(np.load(folder / f"out{number}.npz")) for number in range(len(meshes))]


def assert_equal(result, expected):
  assert result.keys() == expected.keys() and len(result) > 20
  for name in expected.keys() - {"shapes"}:
    np.testing.assert_allclose(result[name], expected[name], rtol=0, atol=1e-6, err_msg=name)
  assert result["shapes"].tolist() == [[16, 32]] * 4 + [[16, 16]]  # what the process with the long ones needs


@pytest.mark.timeout(600)
def test_two_processes_equal_one_also_where_every_row_lies_on_both(tmp_path, alone):
  own_rows, shared_rows = joined(tmp_path, 2, 2, {"data": 2, "fsdp": 2}, {"fsdp": 1, "context": 4})
  assert_equal(own_rows, alone)
  assert_equal(shared_rows, alone)


@pytest.mark.timeout(600)
def test_four_processes_equal_one_with_a_row_on_two_of_them(tmp_path, alone):
  (result,) = joined(tmp_path, 4, 1, {"fsdp": 2, "tensor": 2})
  assert_equal(result, alone)
