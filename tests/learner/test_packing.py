"""Packing: every token once and in order, rewards on the last sampled token, a few fixed shapes."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given
from toys import training_toy
from toys.rollout_fakes import make_trajectory
from toys.shared_store import SharedStore, together

from sao_jax.config import MeshConfig
from sao_jax.episode import PromptKey, Status, Trajectory
from sao_jax.errors import ConfigError
from sao_jax.learner import batches, compilation, setup
from sao_jax.learner.batches import packed_batch
from sao_jax.learner.packing import check_row_counts, pack, shard_batch, unpack
from sao_jax.learner.placement import Devices
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.mesh import make_mesh
from sao_jax.rollout.builder import TrajectoryBuilder
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


def test_a_context_that_no_row_holds_is_a_clear_error():
  with pytest.raises(ConfigError, match="a context of 17 tokens fits no row") as error:
    pack(lengths(17), (8, 16), (2, 4))
  assert error.value.field == "rollout.row_lengths" and "to 17" in error.value.remedy


@pytest.mark.parametrize(
  "sizes, rows", [((16,) * 5, 8), ((9,) * 5, 8), ((16,) * 9, 12), ((16,) * 13, 16), ((16,) * 17, 24), ((16,) * 25, 32)]
)
def test_a_batch_that_needs_more_rows_gets_a_multiple_of_the_largest_count(sizes, rows):
  batch = pack(lengths(*sizes), (8, 16), (2, 4), multiple_of=2)
  assert batch.token_ids.shape == (rows, 16) and batch.pieces is None
  assert (batch.segment_ids > 0).sum() == sum(sizes)


def segmented(rollout_id: int, *segments: int) -> Trajectory:
  """A trajectory of segments of these lengths: a token of a prompt, the others sampled."""
  builder = TrajectoryBuilder(PromptKey("fake", rollout_id, 0), rollout_id)
  rng = np.random.default_rng(rollout_id)
  for length in segments:
    builder.append_prompt(rng.integers(3, 100, 1, dtype=np.int32))
    ids = rng.integers(3, 100, length - 1, dtype=np.int32)
    builder.append_action(ids, -rng.random(length - 1, dtype=np.float32), np.full(length - 1, 3, np.int32))
    builder.add_reward(float(length))
  return builder.build(0.0, Status.TRUNCATED_TURNS)


def test_a_trajectory_longer_than_a_row_lies_in_several():
  """By hand: rows of 8; 4 + 3 + 5 + 2 + 6 tokens are cut into 7, 7 and 6, a trajectory of 2 fits beside the last."""
  batch = pack([segmented(0, 4, 3, 5, 2, 6), segmented(1, 2)], (4, 8), (2, 4))
  assert batch.token_ids.shape == (4, 8)
  assert batch.segment_ids.tolist() == [
    [1, 1, 1, 1, 2, 2, 2, 0],
    [1, 1, 1, 1, 1, 2, 2, 0],
    [1, 1, 1, 1, 1, 1, 2, 2],
    [0] * 8,
  ]
  assert (
    batch.positions[2].tolist() == [0, 1, 2, 3, 4, 5, 0, 1] and batch.trajectory_ids[2].tolist() == [1] * 6 + [2] * 2
  )
  assert batch.pieces.ids.tolist() == [[1] * 7 + [0], [2] * 7 + [0], [3] * 6 + [0] * 2, [0] * 8]
  assert batch.pieces.trajectory.tolist() == [1, 1, 1, *[0] * 9]
  assert batch.pieces.row[:3].tolist() == [0, 1, 2] and batch.pieces.column[:3].tolist() == [0, 0, 0]
  assert batch.truncated[:3].sum() == 22 and np.flatnonzero(batch.rewards[0]).tolist() == [3, 6]


@given(st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=12), min_size=1, max_size=8))
def test_trajectories_of_any_segments_are_packed_without_loss_and_with_a_bounded_table(all_segments):
  trajectories = [segmented(index, *segments) for index, segments in enumerate(all_segments)]
  experts = lambda t: np.random.default_rng(t.rollout_id).integers(0, 8, (len(t), 2, 1)).astype(np.int16)
  over_age = lambda t: t.action_mask & (np.arange(len(t)) % 3 > 0)
  trajectories = [dataclasses.replace(t, routed_experts=experts(t), loss_mask=over_age(t)) for t in trajectories]
  batch = pack(trajectories, (4, 9), (1, 2), routed_shape=(2, 1), grouped=True)
  found = {one["token_ids"].tobytes(): one for one in unpack(batch)}
  assert len(found) == len(trajectories)
  for trajectory in trajectories:
    one = found[trajectory.token_ids.tobytes()]
    np.testing.assert_array_equal(one["behavior_logprobs"], trajectory.behavior_logprobs)
    np.testing.assert_array_equal(one["rewards"], trajectory.token_rewards)
    np.testing.assert_array_equal(one["routed_experts"], trajectory.routed_experts)
    np.testing.assert_array_equal(one["loss_mask"], trajectory.loss_mask)
    assert len(set(one["group_ids"].tolist())) == 1 and one["truncated"].all()
    assert np.flatnonzero(one["positions"] == 0).tolist() == trajectory.segment_starts.tolist()

  # Only trajectories longer than a row are cut, and the table holds their pieces: three for each row suffice.
  cut = [trajectory for trajectory in trajectories if len(trajectory) > 9]
  assert (batch.pieces is not None) == bool(cut)
  if cut:
    used = batch.pieces.trajectory
    assert len(used) == 3 * len(batch.token_ids) and used.max() == len(cut) and used[-1] == 0
    assert (np.diff(used[used > 0]) >= 0).all() and not used[(used > 0).sum() :].any()


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


def as_process(learner, processes, samplers=None):
  """The learner as a process sees it, each with a device of its own; all sample unless it says which do, alone."""
  hosts = [SimpleNamespace(process_index=index) for index in range(processes.count)]
  learning = [host for host in hosts if host.process_index not in (samplers or ())]
  groups = tuple((host,) for host in (hosts if samplers is None else [hosts[index] for index in samplers]))
  devices = Devices(tuple(learning), groups, processes.index)
  return dataclasses.replace(learner, processes=processes, devices=devices)


def of_two_processes(config, trajectories):
  """The rows of both, when each brings the same trajectories."""
  learner = setup.make_learner(config, tuple(jax.devices()[:1]))

  def rows(processes):
    # On this one process, what another one holds is rows that have to travel.
    return batches._packed_rows(as_process(learner, processes), trajectories)

  return together(SharedStore(), 2, rows)


def test_groups_of_processes_have_numbers_of_their_own(monkeypatch):
  config = training_toy.replace(training_toy.get_config(), rollout={"group_size": 2})
  monkeypatch.setattr(batches, "share_of_rows", lambda sharding, shape, process: process)
  trajectories = [dataclasses.replace(t, rollout_id=i, sample=i % 2) for i, t in enumerate(lengths(4, 5, 6, 3))]
  first, second = (rows.group_ids for rows in of_two_processes(config, trajectories))
  assert set(np.unique(first)) == {0, 1, 2} and set(np.unique(second)) == {0, 5, 6}  # a batch holds 4 trajectories


def test_pieces_of_processes_have_numbers_and_rows_of_their_own(monkeypatch):
  config = training_toy.replace(training_toy.get_config(), rollout={"row_lengths": (8,), "row_counts": (8,)})
  monkeypatch.setattr(batches, "share_of_rows", lambda sharding, shape, process: process)
  trajectories = [segmented(0, 8, 8), segmented(1, 3)]
  first, second = (rows.pieces for rows in of_two_processes(config, trajectories))
  assert set(np.unique(first.ids)) == {0, 1, 2} and first.row[:2].tolist() == [0, 1]
  assert set(np.unique(second.ids)) == {0, 13, 14} and second.row[:2].tolist() == [4, 5]  # behind 12 entries, 4 rows
  assert second.trajectory.tolist() == first.trajectory.tolist() == [1, 1, *[0] * 10]


def test_processes_share_the_largest_bucket_that_any_of_them_needs(monkeypatch):
  """Rows of 8 or 16 tokens, 8 or 16 of them in all: one has long trajectories, one many, one of them in pieces."""
  config = training_toy.replace(training_toy.get_config(), rollout={"row_lengths": (8, 16), "row_counts": (8, 16)})
  learner = setup.make_learner(config, tuple(jax.devices()[:1]))
  monkeypatch.setattr(batches, "share_of_rows", lambda sharding, shape, process: None)
  own = [lengths(12, 3), lengths(*[7] * 6)]

  def rows(processes):
    return batches._packed_rows(as_process(learner, processes), own[processes.index])

  first, second = together(SharedStore(), 2, rows)
  assert first.token_ids.shape == second.token_ids.shape == (4, 16) and first.pieces is second.pieces is None
  assert [len(list(unpack(each))) for each in (first, second)] == [2, 6]

  # Many short ones decide the number of rows, one that is cut that all have a table of pieces.
  own[:] = [[segmented(0, 16, 16)], lengths(*[9] * 6)]
  first, second = together(SharedStore(), 2, rows)
  assert first.token_ids.shape == second.token_ids.shape == (8, 16)
  assert first.pieces.ids.any() and second.pieces is not None and not second.pieces.ids.any()

  # One that is asked to stop stops all.
  own[0] = None
  assert together(SharedStore(), 2, rows) == [None, None]


def test_who_only_learns_has_padding_in_the_shape_that_the_samplers_need():
  """Of three processes the last two sample: 8 or 16 rows in all are 4 or 8 of each."""
  config = training_toy.replace(training_toy.get_config(), rollout={"row_lengths": (8, 16), "row_counts": (8, 16)})
  config = training_toy.replace(config, rollout={"group_size": 2})
  learner = setup.make_learner(config, tuple(jax.devices()[:1]))
  own = [(), lengths(12, 3), lengths(*[7] * 6)]

  def rows(processes):
    return batches._packed_rows(as_process(learner, processes, samplers=(1, 2)), own[processes.index])

  padding, first, second = together(SharedStore(), 3, rows)
  assert padding.token_ids.shape == first.token_ids.shape == second.token_ids.shape == (4, 16)
  assert not padding.segment_ids.any() and [len(list(unpack(each))) for each in (first, second)] == [2, 6]
  assert first.group_ids.max() <= 4 < second.group_ids[second.group_ids > 0].min()

  # It is asked to stop, and so are all.
  own[0] = None
  assert together(SharedStore(), 3, rows) == [None] * 3


def test_a_batch_that_does_not_divide_over_the_processes_is_refused_by_name():
  config = training_toy.get_config()  # 4 trajectories, 8 rows
  for changes, count, field in (
    ({}, 3, "rollout.batch_size"),
    ({"group_size": 2}, 4, "rollout.batch_size"),
    ({"row_counts": (6,)}, 4, "rollout.row_counts"),
  ):
    with pytest.raises(ConfigError, match=f"does not divide over {count}") as error:
      setup.check_shares(training_toy.replace(config, rollout=changes), count)
    assert error.value.field == field
  setup.check_shares(config, 4)
  assert setup.share_of_batch(config, 4).batch_size == 1


class _Programs:
  """Stands for `make_step`; notes what was compiled."""

  def __init__(self):
    self.compiled = []

  def __call__(self, learner, *, update_policy, rows):
    self.rows = rows
    return self

  def lower(self, state, rows):
    self.compiled.append((rows.token_ids.shape, rows.pieces is not None, rows.token_ids.sharding))
    return self

  def compile(self):
    return lambda state, rows: (state, {})


def test_a_program_that_nobody_expected_is_compiled_once_when_its_batch_comes(monkeypatch):
  """For more rows than are configured, and for trajectories in several rows; a step waits for its own."""
  config = training_toy.replace(training_toy.get_config(), rollout={"row_lengths": (8,), "row_counts": (8,)})
  learner = setup.make_learner(config, tuple(jax.devices()[:1]))
  programs = _Programs()
  monkeypatch.setattr(compilation, "make_step", programs)
  never = type("Never", (), {"requested": False})()
  with compilation.CompiledSteps(learner, [True]) as steps:
    plain, cut, many = (
      packed_batch(learner, trajectories).rows
      for trajectories in ([segmented(0, 8)], [segmented(0, 8, 8)], [segmented(i, 8) for i in range(9)])
    )
    for rows in (plain, cut, many, cut, many):
      assert steps.wait(rows, update_policy=True, interrupt=never)
      assert steps(None, rows, update_policy=True) == (None, {})
  shapes = [(shape, pieces) for shape, pieces, _ in programs.compiled]
  assert sorted(shapes) == [((8, 8), False), ((8, 8), True), ((16, 8), False)] and programs.rows == 16
  assert {sharding for *_, sharding in programs.compiled} == {plain.token_ids.sharding}
  with pytest.raises(KeyError):
    steps(None, plain, update_policy=False)


@pytest.mark.parametrize("rows, micro_batches", [(0, 2), (8, 2), (16, 4), (24, 6)])
def test_more_rows_are_computed_in_as_many_times_more_micro_batches(monkeypatch, rows, micro_batches):
  config = training_toy.replace(
    training_toy.get_config(), rollout={"row_counts": (4, 8)}, algorithm={"micro_batches": 2}
  )
  made = []
  monkeypatch.setattr(setup, "make_train_step", lambda algorithm, *args, **options: made.append(algorithm))
  setup.make_step(setup.make_learner(config, tuple(jax.devices()[:1])), rows=rows)
  assert [algorithm.micro_batches for algorithm in made] == [micro_batches]
