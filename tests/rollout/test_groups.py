"""Groups through the whole loop: completeness, failures, staleness, deterministic runs, going on."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import time
import zlib

import numpy as np
import pytest
from toys.rollout_fakes import FakeEnvironment, FakePrompts, FakeSampler, Running, make_buffer, make_loop, submit, train
from toys.rollout_fakes import make_trajectory as trajectory
from toys.sampler_fakes import FakeEngine

from sao_jax.config import SamplerConfig
from sao_jax.episode import InfrastructureFailure
from sao_jax.rollout.outcomes import BadEvidence, EnvironmentDown, Outcome, PromptsExhausted, check_identity
from sao_jax.rollout.serialization import trajectories_from_state, trajectories_to_state
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService

GROUPS = {"batch_size": 8, "group_size": 4}


def jitter(rollout_id: int) -> float:
  """Latencies in another order than the rollouts."""
  return float(np.random.default_rng(rollout_id).uniform(0, 0.01))


def check_groups(batch, size: int) -> None:
  """Whole groups, one behind the other, each of one prompt."""
  assert len(batch) % size == 0
  for start in range(0, len(batch), size):
    group = batch[start : start + size]
    assert [(t.group, t.sample) for t in group] == [(group[0].rollout_id, sample) for sample in range(size)]
    assert [t.rollout_id for t in group] == list(range(group[0].group, group[0].group + size))
    assert len({t.key for t in group}) == 1
  assert len({t.group for t in batch}) == len(batch) // size


async def fails_now_and_then(*_):
  if fails_now_and_then.random.integers(8) == 0:
    raise InfrastructureFailure("fake", "gone")
  return np.int32([5, 6, 7])


@pytest.mark.parametrize("slots", [1, 3, 40])
@pytest.mark.parametrize("eta", [0, 2])
def test_batches_of_whole_groups_whatever_fails(slots, eta):
  """Fewer slots than a group has rollouts, and a capacity of one batch: nothing waits for ever."""
  fails_now_and_then.random = np.random.default_rng(slots + eta)
  sampler, prompts = FakeSampler(delay=lambda rollout_id: jitter(rollout_id) / 5), set()

  def inspect(batch, version):
    check_groups(batch, 4)
    prompts.update(t.key.id for t in batch)
    assert len({t.token_ids.tobytes() for t in batch}) > len(batch) // 4  # the samples of a prompt differ

  loop = make_loop(
    lambda: FakeEnvironment(faults={"reset": fails_now_and_then}),
    sampler,
    slots=slots,
    admission_staleness=eta,
    **GROUPS,
  )
  with Running(loop):
    train(loop, sampler, 10, batch_size=8, inspect=inspect)
  stats = loop.stats()
  check_identity(stats)
  assert stats["trained"] == 80 and len(prompts) == 20 and not sampler.open
  own = stats["failed_infrastructure/InfrastructureFailure"]
  others = stats["failed_infrastructure/group/InfrastructureFailure"]
  assert own > 0 and others == 3 * own and stats["failed_infrastructure"] == own + others
  assert stats["in_flight"] == stats["in_training"] == 0
  assert stats["submitted"] == sum(stats[outcome.value] for outcome in Outcome) + stats["buffered"]


def test_the_others_of_a_failed_rollout_are_stopped_at_once():
  environments = []

  class Environment(FakeEnvironment):
    async def reset(self, prompt):
      environments.append(self)
      if prompt.key.id == 0 and len(environments) == 4:
        raise InfrastructureFailure("fake", "gone")
      return await super().reset(prompt)

  sampler = FakeSampler(delay=lambda rollout_id: 3600.0 if rollout_id < 3 else 0.0)
  loop = make_loop(Environment, sampler, slots=4, admission_staleness=0, **GROUPS)
  with Running(loop):
    batch = loop.buffer.take(8, 0, timeout=20)  # of prompts 1 and 2: nobody waits an hour
    loop.check()
  check_groups(batch, 4)
  assert {t.key.id for t in batch} == {1, 2} and all(environment.closed for environment in environments[:4])
  stats = loop.stats()
  assert stats["aborted"] == 0 and stats["failed_infrastructure"] == 4


def fill_groups(buffer, *versions: tuple[int, ...]) -> None:
  """Submits one group for each tuple and puts a trajectory for each of its versions, None for one still in flight."""
  for number, group in enumerate(versions):
    ids = [number * len(group) + sample for sample in range(len(group))]
    assert submit(buffer.ledger, *ids)
    for sample, (rollout_id, version) in enumerate(zip(ids, group)):
      if version is not None:
        buffer.put(trajectory(rollout_id, sample=sample, version=version))


@pytest.mark.parametrize("mode", ["drop", "mask"])
def test_one_stale_rollout_drops_its_whole_group(mode):
  buffer = make_buffer(batch_size=4, eta=3, group_size=2, max_staleness=1, staleness=mode)
  cancelled = []
  buffer.ledger.on_cancel = cancelled.append
  fill_groups(buffer, (0, 2), (1, 2), (0, None), (2, 2), (0, 0))
  batch = buffer.take(4, 2)
  check_groups(batch, 2)
  assert [t.group for t in batch] == [2, 2, 6, 6] and cancelled == [5]
  counters = buffer.ledger.counters()
  check_identity(counters)
  assert counters["dropped_stale/older than 1 versions"] == 4  # 0, 4, 8 and 9
  assert counters["dropped_stale/group/older than 1 versions"] == 2 and counters["dropped_stale"] == 6
  # The drop rate knows the finished ones; the one in flight has no length.
  summary = buffer.statistics.summary()
  assert sum(summary["dropped_by_length"].values()) == 5 and summary["generated"] == 9
  assert buffer.put(trajectory(5, sample=1, version=2)) is False  # it was too late to stop it
  assert buffer.ledger.counters() == counters and buffer.ledger.capacity == 12


def test_a_rollout_that_is_stale_on_arrival_drops_its_group():
  buffer = make_buffer(batch_size=2, eta=1, group_size=2, max_staleness=1, version=3)
  fill_groups(buffer, (3, 0), (3, 3))
  assert [t.group for t in buffer.take(2, 3)] == [2, 2]
  assert buffer.ledger.counters()["dropped_stale"] == 2 and buffer.ledger.capacity == 2
  assert buffer.statistics.summary()["dropped_by_length"] == {4: 2}


@pytest.mark.parametrize("mode", ["drop", "mask"])
def test_groups_that_grow_stale_in_a_live_loop_are_stopped(mode):
  """The trainer's thread cancels rollouts that run: no session stays open, and batches are whole groups."""
  delay = lambda number: float(np.random.default_rng(number).choice([0, 0.002, 0.05, 0.12], p=[0.4, 0.3, 0.2, 0.1]))
  sampler = FakeSampler(delay=delay)
  loop = make_loop(sampler=sampler, slots=10, admission_staleness=2, max_staleness=1, staleness=mode, **GROUPS)
  with Running(loop):
    train(loop, sampler, 12, batch_size=8, inspect=lambda batch, _: check_groups(batch, 4))
  stats = loop.stats()
  check_identity(stats)
  assert stats["dropped_stale/group/older than 1 versions"] > 0 and not sampler.open


def test_failures_in_a_row_are_counted_in_every_group():
  """A dead environment stops the run, though each of its failures ends a group."""
  sampler = FakeSampler()

  async def broken():
    raise InfrastructureFailure("fake", "gone", retryable=False)

  make_environment = lambda: FakeEnvironment(faults={"reset": broken})
  loop = make_loop(make_environment, sampler, slots=8, outage_seconds=0.2, **GROUPS)
  with Running(loop), pytest.raises(EnvironmentDown, match="'fake': all .* attempts in .* s failed"):
    train(loop, sampler, 1, batch_size=8)
  stats = loop.stats()
  assert stats["failed_infrastructure/group/InfrastructureFailure"] > 0 and stats["trained"] == 0
  check_identity(stats)


def test_over_age_tokens_of_a_group_are_masked_where_something_is_left():
  buffer = make_buffer(batch_size=2, eta=0, group_size=2, max_staleness=1, staleness="mask", version=2)
  assert submit(buffer.ledger, 0, 1)
  buffer.put(trajectory(0, version=[0, 1, 2, 2]))
  buffer.put(trajectory(1, sample=1, version=2))
  assert [t.num_trained for t in buffer.take(2, 2)] == [3, 4]
  buffer.batch_done(3)
  counters = buffer.ledger.counters()
  assert (counters["masked"], counters["trained"]) == (1, 1)


def test_bad_evidence_ends_the_group_and_take_wants_whole_groups():
  buffer = make_buffer(batch_size=4, group_size=2)
  assert submit(buffer.ledger, 0, 1)
  buffer.put(trajectory(0))
  with pytest.raises(BadEvidence) as caught:
    buffer.put(trajectory(1, sample=1, reward=float("nan")))
  buffer.ledger.fail(1, Outcome.FILTERED, caught.value.reason)
  counters = buffer.ledger.counters()
  assert (counters["filtered/reward not finite"], counters["filtered/group/reward not finite"]) == (1, 1)
  assert len(buffer) == 0 and counters["filtered"] == 2
  with pytest.raises(ValueError, match="whole groups of 2"):
    buffer.take(3, 0)


def test_prompts_that_end_leave_whole_groups():
  sampler = FakeSampler(delay=jitter)
  with Running(make_loop(sampler=sampler, prompts=FakePrompts(5), **GROUPS)) as loop:
    version = train(loop, sampler, 2, batch_size=8, inspect=lambda batch, _: check_groups(batch, 4))
    with pytest.raises(PromptsExhausted):
      loop.buffer.take(8, version, timeout=20)
    assert len(loop.buffer) == 4


@pytest.mark.parametrize("stop_first", [False, True])
def test_half_finished_groups_survive(stop_first):
  # The last two of every group hang in the first run.
  first_sampler = FakeSampler(delay=lambda rollout_id: 3600.0 if rollout_id >= 8 and rollout_id % 4 > 1 else 0.0)
  options = {**GROUPS, "admission_staleness": 1, "slots": 16}
  first, used = make_loop(sampler=first_sampler, prompts=FakePrompts(6), **options), []

  def inspect(batch, version):
    check_groups(batch, 4)
    used.extend((t.key.id, t.sample) for t in batch)

  with Running(first):
    version = train(first, first_sampler, 1, batch_size=8, inspect=inspect)
    deadline = time.monotonic() + 20
    while first.stats()["buffered"] < 8:
      assert time.monotonic() < deadline
      time.sleep(0.001)
    state, arrays = first.state_dict()
  if stop_first:
    state, arrays = first.state_dict()
  assert [number for number, _, _ in state["intake"]["unfinished"]] == [n for n in range(8, 24) if n % 4 > 1]
  assert len(state["trajectories"]) == 8 and {r["sample"] for r in state["trajectories"]} == {0, 1}

  sampler = FakeSampler(version=version)
  second = make_loop(sampler=sampler, prompts=FakePrompts(6), **options)
  second.load_state_dict(json.loads(json.dumps(state)), arrays)
  assert len(second.buffer) == 0 and second.stats()["buffered"] == 8
  with Running(second):
    train(second, sampler, 2, batch_size=8, version=version, inspect=inspect)
    stats = second.stats()
  assert sorted(used) == [(prompt, sample) for prompt in range(6) for sample in range(4)]
  assert stats["submitted"] == stats["trained"] == 24


def deterministic_run(timing: int, **options) -> tuple[list, dict]:
  """(trajectories trained on, outcomes) of a deterministic run whose delays depend on `timing`, and its faults not."""
  delays = np.random.default_rng(timing)

  class Environment(FakeEnvironment):
    long = False  # the last action

    async def step(self, action_ids):
      await asyncio.sleep(float(delays.uniform(0, 0.004)))
      if zlib.crc32(action_ids.tobytes()) % 6 == 0:
        raise InfrastructureFailure("fake", "gone")
      self.long = len(action_ids) > 3
      result = await super().step(action_ids)
      return dataclasses.replace(result, reward=float(self.long)) if result.done else result

    async def on_truncated(self, status):
      return float(self.long)

  trained, version = [], 0
  engine = FakeEngine(SamplerConfig(num_slots=8, context_length=64, decode_steps=4))
  with SamplerService(Scheduler(engine)) as service:
    loop = make_loop(
      Environment,
      service,
      slots=6,
      deterministic=True,
      admission_staleness=1,
      **GROUPS,
      **options,
    )
    with Running(loop):
      for _ in range(5):
        batch = loop.buffer.take(8, version, timeout=60)
        check_groups(batch, 4)
        trained += [(t.rollout_id, t.key.id, t.token_ids.tolist(), t.reward) for t in batch]
        version += 1
        loop.wait_until_idle(60)
        service.publish(None, version)
        loop.on_version(version)
      loop.wait_until_idle(60)
      stats = loop.stats()
      check_identity(stats)
  return trained, {outcome: stats[outcome.value] for outcome in Outcome}


def test_a_deterministic_run_with_groups_repeats_itself_whatever_the_timing():
  trained, outcomes = deterministic_run(timing=0)
  assert len(trained) == outcomes[Outcome.TRAINED] == 40 and outcomes[Outcome.FAILED_INFRASTRUCTURE] >= 8
  assert deterministic_run(timing=1) == (trained, outcomes)


def test_it_repeats_itself_when_groups_of_equal_returns_are_filtered():
  trained, outcomes = deterministic_run(timing=0, filter_equal_groups=True)
  assert len(trained) == outcomes[Outcome.TRAINED] == 40 and outcomes[Outcome.FILTERED] > 0
  assert all(len({reward for *_, reward in trained[start : start + 4]}) == 2 for start in range(0, 40, 4))
  assert deterministic_run(timing=1, filter_equal_groups=True) == (trained, outcomes)


def test_a_trajectory_keeps_its_sample_through_storage_and_old_ones_are_groups_of_one():
  records, arrays = trajectories_to_state([trajectory(7, sample=3)])
  assert [(t.sample, t.group) for t in trajectories_from_state(records, arrays)] == [(3, 4)]
  del records[0]["sample"]
  assert [(t.sample, t.group) for t in trajectories_from_state(records, arrays)] == [(0, 7)]


def test_with_groups_of_one_everything_is_as_it_was():
  """The same prompts under the same ids, in the order in which they finish; nothing is counted for a group."""
  fails_now_and_then.random = np.random.default_rng(0)
  order, sampler = [], FakeSampler(delay=jitter)
  loop = make_loop(lambda: FakeEnvironment(faults={"reset": fails_now_and_then}), sampler, slots=5)
  put = loop.buffer.put
  loop.buffer.put = lambda trajectory: order.append(trajectory.rollout_id) or put(trajectory)
  taken = []
  with Running(loop):
    train(loop, sampler, 6, inspect=lambda batch, version: taken.append([t.rollout_id for t in batch]))
    stats = loop.stats()
  assert taken == [sorted(order[i : i + 4]) for i in range(0, 24, 4)]
  assert collections.Counter("group" in name for name in stats if "/" in name)[True] == 0
  assert stats["failed_infrastructure"] == stats["failed_infrastructure/InfrastructureFailure"] > 0
