"""Recorded experts on their way to the learner: episodes, segments, evidence, packing, checkpoints."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from toys.rewriting import Rewriting
from toys.rewriting import play as play_episode
from toys.rollout_fakes import completion, fill, make_buffer

from sao_jax.episode import PromptKey, Status
from sao_jax.learner.packing import pack, unpack
from sao_jax.rollout.builder import TrajectoryBuilder
from sao_jax.rollout.evidence import RequiredExperts, check_routed_experts, check_trajectory
from sao_jax.rollout.outcomes import BadEvidence, check_identity
from sao_jax.rollout.serialization import trajectories_from_state, trajectories_to_state

REQUIRED = RequiredExperts(num_layers=2, num_active=2, num_experts=100)
KEY = PromptKey("fake", 0, 0)


def rows_of(start, count):
  """Experts of `count` tokens: two layers, two experts, all of them told apart by the token's index."""
  index = np.arange(start, start + count)
  return np.stack([np.stack([index, 50 + index], -1), np.stack([50 + index, index], -1)], 1).astype(np.int16)


def build(*segments):
  """A trajectory of segments, each a list of (unsampled, sampled) tokens, with the experts of what was read."""
  builder, position = TrajectoryBuilder(KEY, 0), 0
  for segment in segments:
    unread = 0
    for turn, (unsampled, sampled) in enumerate(segment):
      append = builder.append_observation if turn else builder.append_prompt
      append(np.full(unsampled, 3, np.int32))
      unread += unsampled + sampled
      experts = rows_of(position, unread - 1)
      assert builder.num_unrouted == unread - sampled
      builder.append_action(np.full(sampled, 7), np.full(sampled, -1.0), np.zeros(sampled, np.int32), experts)
      position, unread = position + unread - 1, 1
    position += 1  # the last token of a segment, which nothing reads
  return builder, position


def test_turns_and_segments_stay_aligned():
  """Every token has the row of its own index; the last one of a segment, and what follows the end, has none."""
  builder, length = build([(3, 2), (2, 2)], [(4, 1), (0, 3)])
  builder.append_observation(np.full(2, 3, np.int32))
  trajectory = builder.build(1.0, Status.TERMINATED)
  expected = rows_of(0, length + 2)
  expected[[8, 16, 17, 18]] = -1
  np.testing.assert_array_equal(trajectory.routed_experts, expected)
  check_trajectory(trajectory, REQUIRED)


def test_rows_of_other_tokens_are_refused():
  builder, _ = build([(3, 2)])
  builder.append_observation(np.full(2, 3, np.int32))
  for count in (1, 3, 5):  # 3 unread tokens and 2 new ones, the last of which nothing has read: 4
    with pytest.raises(ValueError, match="experts of 4 tokens are wanted"):
      builder.append_action(np.full(2, 7), np.full(2, -1.0), np.zeros(2, np.int32), rows_of(0, count))


def test_the_episode_driver_takes_what_the_sampler_recorded(monkeypatch):
  """Through an environment that rewrites its history once: prompts of 2 and 3, observations of 1, answers of 2."""
  counts = iter([3, 3, 4, 3])
  number = iter(range(4))

  def recorded(*args, **kwargs):
    experts = np.full((next(counts), 2, 2), next(number), np.int16)
    return dataclasses.replace(completion(*args, **kwargs), routed_experts=experts)

  monkeypatch.setattr("toys.rewriting.completion", recorded)
  _, trajectory = play_episode(Rewriting(), [9, 2])
  assert trajectory.routed_experts[:, 0, 0].tolist() == [0, 0, 0, 1, 1, 1, -1, 2, 2, 2, 2, 3, 3, 3, -1]
  counts, number = iter([3, 2]), iter(range(4))
  with pytest.raises(BadEvidence, match="those of 3 tokens are wanted, got 2"):
    play_episode(Rewriting(), [9, 2])


@pytest.mark.parametrize(
  "experts, reason",
  [
    (np.zeros((3, 2), np.int16), "routed experts malformed"),
    (np.zeros((3, 2, 2), np.float32), "routed experts malformed"),
    (np.zeros((2, 2, 2), np.int16), "routed experts of another length"),
    (np.zeros((3, 2, 3), np.int16), "routed experts of another shape"),
    (np.full((3, 2, 2), 65539, np.int32), "routed experts impossible"),  # as int16 it would be expert 3
    (np.full((3, 2, 2), 65535, np.uint16), "routed experts impossible"),  # and this "not recorded"
  ],
)
def test_bad_completions(experts, reason):
  assert check_routed_experts(None, 3) is None
  assert check_routed_experts(np.zeros((3, 2, 2), np.uint8), 3).dtype == np.int16
  with pytest.raises(BadEvidence) as error:
    check_routed_experts(experts, 3, (2, 2))
  assert error.value.reason == reason


def changed(index, value):
  trajectory = build([(3, 2), (2, 2)])[0].build(1.0, Status.TERMINATED)
  trajectory.routed_experts[index] = value
  return trajectory


@pytest.mark.parametrize(
  "trajectory, reason",
  [
    (dataclasses.replace(changed(8, -1), routed_experts=None), "routed experts missing"),
    (changed(2, -1), "routed experts missing"),  # the last token of the prompt: the first one was sampled from it
    (changed((2, 0, 0), -1), "routed experts impossible"),
    (changed((2, 0, 0), 100), "routed experts impossible"),
    (changed((2, 0), 7), "routed experts impossible"),  # twice the same
    (dataclasses.replace(changed(8, -1), routed_experts=rows_of(0, 8)), "routed experts of another shape"),
  ],
)
def test_bad_trajectories(trajectory, reason):
  check_trajectory(changed(8, -1), REQUIRED)
  check_trajectory(trajectory)  # not looked at unless it is to be replayed
  with pytest.raises(BadEvidence) as error:
    check_trajectory(trajectory, REQUIRED)
  assert error.value.reason == reason


def test_packing_and_checkpoints_keep_every_row():
  first, second = (build(*segments)[0].build(1.0, Status.TERMINATED) for segments in ([[(3, 2)]], [[(2, 1)], [(2, 4)]]))
  second = dataclasses.replace(second, rollout_id=1)
  batch = pack([first, second], (16,), (2,), routed_shape=(2, 2))
  assert (batch.routed_experts[batch.trajectory_ids == 0] == -1).all()
  for got, want in zip(unpack(batch), (second, first), strict=True):  # the longer one comes first
    np.testing.assert_array_equal(got["routed_experts"], want.routed_experts)
  for restored, want in zip(trajectories_from_state(*trajectories_to_state([first, second])), (first, second)):
    np.testing.assert_array_equal(restored.routed_experts, want.routed_experts)
    assert restored.routed_experts.dtype == np.int16
  plain = dataclasses.replace(first, routed_experts=None)
  assert trajectories_from_state(*trajectories_to_state([plain]))[0].routed_experts is None
  for mixed in ([plain, second], [first, plain, second]):  # a run that began to record in between
    for restored, want in zip(trajectories_from_state(*trajectories_to_state(mixed)), mixed, strict=True):
      assert (restored.routed_experts is None) == (want.routed_experts is None)
      if want.routed_experts is not None:
        np.testing.assert_array_equal(restored.routed_experts, want.routed_experts)


def test_what_was_buffered_without_experts_is_filtered_by_a_run_that_replays():
  trajectory = changed(8, -1)
  plain = dataclasses.replace(trajectory, routed_experts=None, rollout_id=1)
  before = make_buffer()
  fill(before, trajectory, plain)
  after = make_buffer(required_experts=REQUIRED)
  after.restore(before.snapshot())
  counters = after.ledger.counters()
  assert len(after) == counters["buffered"] == 1 and counters["filtered/routed experts missing"] == 1
  check_identity(counters)
