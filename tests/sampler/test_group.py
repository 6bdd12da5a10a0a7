"""A sampler whose mesh spans two processes, against the same mesh in one."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from toys import group_toy
from toys.paths import TESTS
from toys.processes import run_together

from sao_jax.sampler.engine import Engine

TOY = str(TESTS / "toys" / "group_toy.py")


@pytest.fixture(scope="module")
def ended():
  """Both processes, of which the follower has died."""
  return run_together([TOY, "follower"], devices=1, seconds=250, check=False)


def said(process):
  """What a process has printed, without what others print into it."""
  lines = [line for line in process.stdout.splitlines() if line.startswith(("{", "["))]
  return [json.loads(line) for line in lines if "[Gloo]" not in line]


@pytest.mark.timeout(300)
def test_two_processes_sample_what_one_does(ended):
  answers = said(ended[0])[0]
  for case in group_toy.CASES:
    engine, weights = group_toy.engine_of(case, Engine, tuple(jax.devices()[:2]))
    expected = group_toy.played(engine, weights)
    answer = answers[case]
    for (ids, logprobs, versions), (other_ids, other_logprobs, other_versions) in zip(
      answer["records"] + [answer["fixed"]], expected["records"] + [expected["fixed"]], strict=True
    ):
      assert ids == other_ids and versions == other_versions
      np.testing.assert_allclose(logprobs, other_logprobs, atol=1e-5)
    assert answer["experts"] == expected["experts"]
    assert answer["counts"] == expected["counts"]

    # All that was to be tried has happened.
    counts = answer["counts"]
    assert counts["publishes"] == 1 and counts["parked"] > 0
    assert (counts["preempted"] > 0 and counts["reprefilled"] > 0) == (case == "pages")
    assert {0, 1} <= {version for _, _, versions in answer["records"] for version in versions}
    assert set(answer["fixed"][2]) == {0}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dying", ["follower", "leader"])
def test_a_process_that_dies_ends_the_other_with_its_name(ended, dying):
  done = ended if dying == "follower" else run_together([TOY, dying], devices=1, seconds=150, check=False)
  index = ("leader", "follower").index(dying)
  other = done[1 - index]
  assert (done[index].returncode, other.returncode) == (-9, 0), other.stderr[-3000:]
  message, kinds = said(other)[-1]
  assert message.startswith(f"Process {index}, which {'leads' if dying == 'leader' else 'follows'}"), message
  assert kinds == (1 if dying == "follower" else 0)  # whoever waited for tokens got the reason

  # Until then the programs of both threads had one order in both processes.
  total, lengths = said(done[0])[1 if dying == "follower" else 0]
  assert total == 2.0**5 and lengths == [40] * 4
