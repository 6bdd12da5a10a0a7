"""Groups of equal returns are filtered and counted, and others take their place (DAPO's dynamic sampling)."""

from __future__ import annotations

import collections

import pytest
from toys.rollout_fakes import FakeEnvironment, FakeSampler, Running, make_buffer, make_loop, submit, train
from toys.rollout_fakes import make_trajectory as trajectory

from sao_jax.environments.base import StepResult
from sao_jax.rollout.outcomes import NothingButEqualGroups, check_identity


def put_group(buffer, first: int, rewards: tuple[float, ...]) -> list[bool]:
  assert submit(buffer.ledger, *range(first, first + len(rewards)))
  return [buffer.put(trajectory(first + i, reward=reward, sample=i)) for i, reward in enumerate(rewards)]


def test_a_group_leaves_when_its_last_rollout_brings_no_difference():
  buffer = make_buffer(batch_size=2, eta=1, group_size=2, filter_equal_groups=True)
  assert put_group(buffer, 0, (1.0, 1.0)) == [True, False]
  assert buffer.ledger.capacity == 4 and len(buffer) == 0
  assert put_group(buffer, 2, (0.0, 1.0)) == [True, True]
  assert put_group(buffer, 4, (0.0, 0.0)) == [True, False]
  counters = buffer.ledger.counters()
  assert (counters["filtered"], counters["filtered/equal returns"], counters["buffered"]) == (4, 4, 2)
  check_identity(counters)
  assert [t.rollout_id for t in buffer.take(2, 0)] == [2, 3]


def test_without_the_switch_they_stay():
  buffer = make_buffer(batch_size=2, eta=1, group_size=2)
  assert put_group(buffer, 0, (1.0, 1.0)) == [True, True]
  assert len(buffer) == 2


def test_a_run_of_nothing_else_stops_and_says_so():
  """Ten times what may be under way; one group that differs begins the count anew."""
  buffer = make_buffer(batch_size=2, eta=0, group_size=2, filter_equal_groups=True)
  for group in range(9):
    put_group(buffer, 2 * group, (1.0, 1.0))
  put_group(buffer, 18, (1.0, 0.0))
  buffer.take(2, 0)
  buffer.batch_done(1)
  for group in range(10, 20):
    assert buffer._error is None
    put_group(buffer, 2 * group, (0.0, 0.0))
  with pytest.raises(NothingButEqualGroups, match="10 groups in a row had equal returns, the last one 0"):
    buffer.take(2, 1)


class Coin(FakeEnvironment):
  """Half of the prompts are solved always, the others half of the time."""

  async def reset(self, prompt):
    self._easy = prompt.key.id % 2
    return await super().reset(prompt)

  async def step(self, action_ids):
    return StepResult([], True, 1.0 if self._easy else float(len(action_ids) % 2))


def test_through_the_whole_loop_every_batch_is_of_groups_that_differ():
  sampler, kept = FakeSampler(), collections.Counter()

  def inspect(batch, version):
    for start in range(0, len(batch), 4):
      group = batch[start : start + 4]
      kept[group[0].key.id % 2] += 1
      assert len({t.group for t in group}) == 1 and len({t.reward for t in group}) == 2

  loop = make_loop(Coin, sampler, batch_size=8, group_size=4, filter_equal_groups=True)
  with Running(loop):
    train(loop, sampler, 8, batch_size=8, inspect=inspect)
  stats = loop.stats()
  check_identity(stats)
  assert set(kept) == {0} and stats["filtered/equal returns"] == stats["filtered"] > 8
