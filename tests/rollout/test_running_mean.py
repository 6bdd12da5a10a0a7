"""Baselines of running means: windows by prompt or of all, the buffer that applies them, several processes."""

from __future__ import annotations

import collections
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from toys import pieces_toy

from sao_jax.algorithm.baselines import running_mean_advantages
from sao_jax.config import AlgorithmConfig
from sao_jax.episode import PromptKey
from sao_jax.errors import ConfigError
from sao_jax.learner.packing import pack, unpack
from sao_jax.rollout.running_mean import RunningMeans
from sao_jax.rollout.serialization import trajectories_from_state, trajectories_to_state


def key(prompt: int, epoch: int = 0) -> PromptKey:
  return PromptKey("toy", prompt, epoch)


@hypothesis.given(
  st.lists(st.tuples(st.integers(0, 3), st.floats(-9, 9)), max_size=40),
  st.integers(1, 8),
  st.sampled_from(["prompt", "global"]),
)
def test_a_baseline_is_the_mean_of_the_newest_returns(entries, window, scope):
  means, plain = RunningMeans(window, scope), collections.defaultdict(list)
  for epoch, (prompt, value) in enumerate(entries):
    own = plain[prompt if scope == "prompt" else None]
    expected = np.mean(own[-window:]) if own else 0.0
    assert means.baseline(key(prompt, epoch)) == pytest.approx(expected, abs=1e-12)
    means.add([(key(prompt, epoch), value)])
    own.append(value)

    # A checkpoint keeps them.
    other = RunningMeans(window, scope)
    other.load_state_dict(json.loads(json.dumps(means.state_dict())))
    assert other.state_dict() == means.state_dict()


def test_windows_of_several_processes_become_one():
  first, second, both = (RunningMeans(3, "prompt") for _ in range(3))
  first.add([(key(1), 1.0), (key(1), 2.0), (key(2), 5.0)])
  second.add([(key(1), 3.0), (key(1), 4.0)])
  both.load_state_dict([*first.state_dict(), *second.state_dict()])
  assert both.baseline(key(1)) == 3.0 and both.baseline(key(2)) == 5.0


def test_advantages_are_returns_less_the_baselines_that_came_along():
  """Through packing, on sampled tokens alone; serialised trajectories keep their baselines."""
  rng = np.random.default_rng(0)
  trajectories = [pieces_toy.random_trajectory(rng, index) for index in range(4)]
  for index, trajectory in enumerate(trajectories):
    object.__setattr__(trajectory, "baseline", 0.25 * index)
  restored = trajectories_from_state(*trajectories_to_state(trajectories))
  batch = pack(restored, (64,), (4,), baselines=True)
  got = np.asarray(running_mean_advantages(AlgorithmConfig(advantage="running_mean"), batch))

  found = {one["token_ids"].tobytes(): one["rewards"] for one in unpack(batch.replace(rewards=got))}
  for index, trajectory in enumerate(trajectories):
    expected = np.where(trajectory.action_mask, trajectory.reward - 0.25 * index, 0.0)
    np.testing.assert_allclose(found[trajectory.token_ids.tobytes()], expected, atol=1e-6)

  with pytest.raises(ConfigError, match="no baselines"):
    running_mean_advantages(AlgorithmConfig(), pack(restored, (64,), (4,)))
