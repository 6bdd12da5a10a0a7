"""Packing: every token once and in order, rewards on the last sampled token, a few fixed shapes."""

from __future__ import annotations

import dataclasses
import random

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given
from toys import training_toy
from toys.rollout_fakes import make_trajectory

from sao_jax.config import MeshConfig
from sao_jax.episode import Status, Trajectory
from sao_jax.errors import ConfigError
from sao_jax.learner import batches, setup
from sao_jax.learner.batches import packed_batch
from sao_jax.learner.packing import check_row_counts, pack, shard_batch, unpack
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.mesh import make_mesh
from sao_jax.rollout.serialization import trajectories_from_state, trajectories_to_state

turns = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4).map(tuple)
trajectory_lists = st.lists(
  st.tuples(st.integers(1, 4), turns, st.floats(-2, 2, width=32), st.sampled_from(Status)), min_size=1, max_size=12
).map(
  lambda rows: [
    make_trajectory(i, prompt=prompt, turns=turns, reward=reward, status=status, version=i)
    for i, (prompt, turns, reward, status) in enumerate(rows)
  ]
)


@given(trajectory_lists)
def test_every_token_once_in_order_with_its_evidence(trajectories):
  batch = pack(trajectories, (40, 64), (2, 4, 16), multiple_of=2)
  segments = {int(segment["policy_version"].max()): segment for segment in unpack(batch)}
  assert sorted(segments) == [trajectory.rollout_id for trajectory in trajectories]
  for trajectory in trajectories:
    segment = segments[trajectory.rollout_id]
    for name in ("token_ids", "action_mask", "behavior_logprobs", "policy_version"):
      np.testing.assert_array_equal(segment[name], getattr(trajectory, name))
    np.testing.assert_array_equal(segment["positions"], np.arange(len(trajectory)))
    last = np.flatnonzero(trajectory.action_mask)[-1]
    expected = np.zeros(len(trajectory), dtype=np.float32)
    expected[last] = trajectory.reward
    np.testing.assert_array_equal(segment["rewards"], expected)
    assert (segment["truncated"] == trajectory.status.truncated).all()


@given(trajectory_lists)
def test_padding_is_inert_and_segments_are_contiguous(trajectories):
  batch = pack(trajectories, (40,), (4, 16))
  padding = batch.segment_ids == 0
  assert (~padding).sum() == sum(map(len, trajectories))
  assert not batch.action_mask[padding].any() and not batch.truncated[padding].any()
  assert (batch.rewards[padding] == 0).all() and (batch.token_ids[padding] == 0).all()
  assert (batch.positions[padding] == 0).all() and (batch.policy_version[padding] == -1).all()
  assert (np.isnan(batch.behavior_logprobs) == ~batch.action_mask).all()
  for row in batch.segment_ids:
    present = row[row > 0]
    assert (np.diff(present) >= 0).all() and (row[: len(present)] == present).all()
    assert set(present.tolist()) == set(range(1, present.max(initial=0) + 1))


@given(trajectory_lists, st.randoms(use_true_random=False))
def test_the_order_of_the_trajectories_does_not_matter(trajectories, rng: random.Random):
  shuffled = list(trajectories)
  rng.shuffle(shuffled)
  jax.tree.map(np.testing.assert_array_equal, pack(trajectories, (40,), (16,)), pack(shuffled, (40,), (16,)))


def with_mask(mask: list[int], reward: float = 2.0) -> Trajectory:
  action_mask = np.asarray(mask, dtype=np.bool_)
  return dataclasses.replace(
    make_trajectory(reward=reward),
    token_ids=np.full(len(mask), 9, dtype=np.int32),
    action_mask=action_mask,
    behavior_logprobs=np.where(action_mask, np.float32(-1), np.float32(np.nan)),
    policy_version=np.where(action_mask, np.int32(0), np.int32(-1)),
    turn_starts=np.zeros(0, dtype=np.int32),
  )


@pytest.mark.parametrize(
  "mask, index", [([1, 0, 0, 1, 1], 4), ([1, 1, 0, 0, 1, 1, 0, 0], 5), ([0, 1, 0], 1), ([0, 0, 0], None)]
)
def test_reward_is_on_the_last_sampled_token(mask, index):
  rewards = pack([with_mask(mask)], (8,), (1,)).rewards[0]
  assert np.flatnonzero(rewards).tolist() == ([] if index is None else [index])


def test_positions_and_segments_of_a_packed_row():
  batch = pack([with_mask([0, 1, 1]), with_mask([0, 1])], (6,), (1,))
  assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 0]]
  assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
  assert batch.action_mask.tolist() == [[0, 1, 1, 0, 1, 0]]


def test_integer_rewards_are_not_truncated():
  batch = pack([with_mask([1], reward=0.5), with_mask([1], reward=1)], (1,), (2,))
  assert batch.rewards.dtype == np.float32 and sorted(batch.rewards.ravel().tolist()) == [0.5, 1.0]


def lengths(*sizes: int) -> list[Trajectory]:
  return [make_trajectory(i, prompt=1, turns=((size - 1, 0),)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
  "sizes, shape",
  [
    ((8,), (2, 8)),  # the smallest row that holds the longest
    ((9,), (2, 16)),
    ((5, 3, 5, 3), (2, 8)),  # best fit: two full rows
    ((8, 8, 8), (4, 8)),
    ((8,) * 5, (4, 16)),  # five rows of 8 are too many: longer rows
    ((4,) * 16, (4, 16)),
  ],
)
def test_shapes_come_from_the_buckets(sizes, shape):
  assert pack(lengths(*sizes), (16, 8), (4, 2)).token_ids.shape == shape


def test_packing_is_dense():
  batch = pack(lengths(6, 5, 4, 4, 3, 2), (8,), (1, 2, 3, 4))
  assert batch.token_ids.shape == (3, 8) and (batch.segment_ids > 0).all()


@pytest.mark.parametrize(
  "sizes, field", [((17,), "rollout.row_lengths"), ((16,) * 5, "rollout.row_counts"), ((9,) * 5, "rollout.row_counts")]
)
def test_what_no_bucket_holds_is_a_clear_error(sizes, field):
  with pytest.raises(ConfigError) as error:
    pack(lengths(*sizes), (8, 16), (2, 4))
  assert error.value.field == field and "rollout.batch_size" in error.value.remedy


def test_row_counts_are_checked_against_the_mesh_before_training():
  check_row_counts((8, 16), multiple_of=8)
  with pytest.raises(ConfigError, match=r"\[12\] are not multiples of 8") as error:
    check_row_counts((8, 12), multiple_of=8)
  assert error.value.field == "rollout.row_counts"


def test_row_counts_that_do_not_divide_are_refused_while_packing():
  with pytest.raises(ConfigError, match="multiples of 4"):
    pack(lengths(3), (8,), (2,), multiple_of=4)


def test_an_empty_batch_is_padding_only():
  batch = pack([], (8,), (2,))
  assert not batch.segment_ids.any() and not list(unpack(batch))


def test_shard_batch_spreads_rows_over_the_mesh_and_changes_nothing():
  mesh = make_mesh(MeshConfig(data=2, fsdp=4))
  batch = pack(lengths(*range(2, 9)), (8,), (8,), multiple_of=8)
  sharded = shard_batch(batch, Layout(mesh))
  jax.tree.map(np.testing.assert_array_equal, sharded, batch)
  assert {shard.data.shape for shard in sharded.token_ids.addressable_shards} == {(1, 8)}


@given(trajectory_lists)
def test_trajectories_survive_serialization_bit_for_bit(trajectories):
  records, arrays = trajectories_to_state(trajectories)
  for before, after in zip(trajectories, trajectories_from_state(records, arrays)):
    for field in dataclasses.fields(before):
      np.testing.assert_array_equal(getattr(after, field.name), getattr(before, field.name))
      assert type(getattr(after, field.name)) is type(getattr(before, field.name))
    assert after.token_ids.dtype == np.int32 and after.behavior_logprobs.dtype == np.float32


def test_groups_are_numbered_across_rows_with_nothing_on_padding():
  """Six rollouts in groups of two: 7 is alone in its row, so groups 1 and 3 lie in different rows."""
  trajectories = [
    dataclasses.replace(t, rollout_id=10 + i, sample=i % 2) for i, t in enumerate(lengths(7, 2, 3, 3, 5, 4))
  ]
  assert [t.group for t in trajectories] == [10, 10, 12, 12, 14, 14]
  batch = pack(trajectories, (8,), (4,), grouped=True)
  assert ((batch.group_ids > 0) == (batch.trajectory_ids > 0)).all()
  found = {}
  for one in unpack(batch):
    (group,) = set(one["group_ids"].tolist())
    found.setdefault(group, []).append(len(one["token_ids"]))
  assert {group: sorted(sizes) for group, sizes in found.items()} == {1: [2, 7], 2: [3, 3], 3: [4, 5]}
  assert pack(trajectories, (8,), (4,)).group_ids is None


def test_groups_of_processes_have_numbers_of_their_own(monkeypatch):
  config = training_toy.replace(training_toy.get_config(), rollout={"group_size": 2})
  learner = setup.make_learner(config, tuple(jax.devices()[:1]))
  trajectories = [dataclasses.replace(t, rollout_id=i, sample=i % 2) for i, t in enumerate(lengths(4, 5, 6, 3))]
  first = packed_batch(learner, trajectories).rows.group_ids
  monkeypatch.setattr(batches, "data_process_index", lambda: 1)
  second = packed_batch(learner, trajectories).rows.group_ids
  assert set(np.unique(first)) == {0, 1, 2} and set(np.unique(second)) == {0, 5, 6}  # a batch holds 4 trajectories
