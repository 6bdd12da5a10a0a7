"""TrajectoryBuilder: masks, lengths and evidence line up token by token, and every turn extends the last prefix."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from sao_jax.episode import PromptKey, Status
from sao_jax.rollout.builder import TrajectoryBuilder
from sao_jax.rollout.evidence import check_trajectory

KEY = PromptKey("fake", 0, 0)


def ids(n: int) -> np.ndarray:
  return np.arange(n, dtype=np.int32)


def action(n: int, version: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  return ids(n), np.full(n, -0.5, dtype=np.float32), np.full(n, version, dtype=np.int32)


def test_prompt_sampled_observation_sampled():
  builder = TrajectoryBuilder(KEY, 7)
  builder.append_prompt(ids(2))
  builder.append_action(*action(3))
  builder.append_observation(ids(2))
  builder.append_action(*action(1, version=1))
  trajectory = builder.build(0.5, Status.TERMINATED)
  assert trajectory.action_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 1]
  assert len(trajectory.token_ids) == len(trajectory.action_mask) == len(trajectory.behavior_logprobs) == 8
  assert (np.isfinite(trajectory.behavior_logprobs) == trajectory.action_mask).all()
  assert trajectory.policy_version.tolist() == [-1, -1, 0, 0, 0, -1, -1, 1]
  assert trajectory.turn_starts.tolist() == [2, 7]
  assert trajectory.num_sampled == 4 and trajectory.oldest_version == 0 and trajectory.rollout_id == 7


@given(
  prompt=st.integers(1, 5),
  turns=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6),
)
def test_invariants_hold_for_any_episode(prompt, turns):
  builder = TrajectoryBuilder(KEY, 0)
  builder.append_prompt(ids(prompt))
  prefixes = [list(range(prompt))]
  for version, (sampled, observed) in enumerate(turns):
    builder.append_action(*action(sampled, version))
    builder.append_observation(ids(observed))
    prefixes.append(prefixes[-1] + list(range(sampled)) + list(range(observed)))
    assert len(builder) == len(prefixes[-1])
  trajectory = builder.build(1.0, Status.TERMINATED)
  check_trajectory(trajectory)
  assert trajectory.num_sampled == sum(sampled for sampled, _ in turns)
  for prefix in prefixes:
    assert trajectory.token_ids[: len(prefix)].tolist() == prefix
  assert trajectory.action_mask[trajectory.turn_starts].all()
  assert not trajectory.action_mask[:prompt].any()


def test_arrays_are_copies():
  tokens, logprobs, versions = action(2)
  builder = TrajectoryBuilder(KEY, 0)
  builder.append_prompt(tokens)
  builder.append_action(tokens, logprobs, versions)
  tokens[:] = 9
  logprobs[:] = np.nan
  trajectory = builder.build(0.0, Status.TERMINATED)
  assert trajectory.token_ids.tolist() == [0, 1, 0, 1] and np.isfinite(trajectory.behavior_logprobs[2:]).all()


@pytest.mark.parametrize(
  "misuse",
  [
    lambda b: b.append_prompt(ids(0)),
    lambda b: b.append_action(*action(1)),
    lambda b: b.append_observation(ids(1)),
    lambda b: (b.append_prompt(ids(1)), b.append_prompt(ids(1))),
    lambda b: (b.append_prompt(ids(1)), b.append_observation(ids(1))),
    lambda b: (b.append_prompt(ids(1)), b.build(0.0, Status.TERMINATED)),
    lambda b: (b.append_prompt(ids(1)), b.append_action(*action(0))),
    lambda b: (b.append_prompt(ids(1)), b.append_action(ids(2), *action(3)[1:])),
    lambda b: (b.append_prompt(ids(1)), b.append_action(ids(2), np.float32([np.nan, 0]), np.int32([0, 0]))),
    lambda b: (b.append_prompt(ids(1)), b.append_action(ids(1), np.float32([0]), np.int32([-1]))),
  ],
)
def test_misuse_is_refused(misuse):
  with pytest.raises(ValueError):
    misuse(TrajectoryBuilder(KEY, 0))
