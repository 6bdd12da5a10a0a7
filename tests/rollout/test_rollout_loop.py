"""The asynchronous loop with a fake sampler: order, admission, staleness, accounting, no blocked event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time

import numpy as np
import pytest
from toys.rollout_fakes import (
  FakeEnvironment,
  FakePrompts,
  FakeSampler,
  Running,
  fill,
  make_loop,
  make_trajectory,
  train,
)

from sao_jax.episode import EnvironmentFailure, InfrastructureFailure
from sao_jax.rollout import outages
from sao_jax.rollout.outcomes import LoopStopped, Place, PromptsExhausted, check_identity
from sao_jax.rollout.staleness import token_lags


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
  monkeypatch.setattr(outages, "LONGEST_PAUSE", 0.001)


def jitter(rollout_id: int) -> float:
  """Latencies in another order than the rollouts."""
  return float(np.random.default_rng(rollout_id).uniform(0, 0.01))


def test_synchronous_when_eta_is_zero():
  sampler = FakeSampler(delay=jitter)
  seen = []

  def inspect(batch, version):
    assert [trajectory.rollout_id for trajectory in batch] == list(range(4 * version, 4 * version + 4))
    assert [trajectory.key.id for trajectory in batch] == [trajectory.rollout_id for trajectory in batch]
    for trajectory in batch:
      assert set(trajectory.policy_version[trajectory.action_mask].tolist()) == {version}
    seen.append(version)

  with Running(make_loop(sampler=sampler, admission_staleness=0, slots=3)) as loop:
    train(loop, sampler, 6, inspect=inspect)
    stats = loop.stats()
  assert seen == list(range(6)) and stats["max_lag"] == 0 and stats["trained"] == 24


def test_synchronous_loop_is_reproducible_down_to_the_token():
  def run(slots):
    batches = []
    sampler = FakeSampler(delay=jitter)
    with Running(make_loop(sampler=sampler, admission_staleness=0, slots=slots)) as loop:
      train(loop, sampler, 3, inspect=lambda batch, version: batches.extend(batch))
    return batches

  for one, other in zip(run(slots=2), run(slots=8), strict=True):
    for field in dataclasses.fields(one):
      if field.name != "info":  # wall-clock seconds
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))


def test_generation_goes_on_while_the_trainer_trains():
  sampler = FakeSampler(delay=jitter)
  with Running(make_loop(sampler=sampler, admission_staleness=2, slots=4)) as loop:
    loop.buffer.take(4, 0, timeout=20)
    while len(loop.buffer) < 8:  # two more batches, with the first still in training
      time.sleep(0.001)
    stats = loop.stats()
    assert (stats["in_training"], stats["buffered"], stats["capacity"]) == (4, 8, 0)
    sampler.version = 1
    loop.on_version(1)
    train(loop, sampler, 4, version=1)
    stats = loop.stats()
  assert 0 < stats["max_lag"] <= 2 and stats["mean_lag"] > 0


def test_never_more_in_flight_than_slots_or_capacity():
  most = [0, 0]

  class Watching(FakeSampler):
    def new_session(self):
      session = super().new_session()
      counts = [loop.buffer.ledger.count(place) for place in Place]
      most[0], most[1] = max(most[0], counts[0]), max(most[1], sum(counts))
      return session

  sampler = Watching(delay=jitter)
  loop = make_loop(sampler=sampler, admission_staleness=1, slots=3)
  with Running(loop):
    train(loop, sampler, 5, train_time=0.01)
  assert most == [3, 8] and not sampler.open


@pytest.mark.parametrize("tau, mode", [(0, "drop"), (1, "drop"), (0, "mask"), (1, "mask")])
def test_staleness_bound_holds_end_to_end(tau, mode):
  sampler = FakeSampler(delay=lambda rollout_id: 0.03 if rollout_id % 5 == 0 else 0.001)

  def inspect(batch, version):
    for trajectory in batch:
      assert token_lags(trajectory, version).max() <= tau

  loop = make_loop(sampler=sampler, admission_staleness=4, max_staleness=tau, staleness=mode)
  with Running(loop):
    train(loop, sampler, 15, inspect=inspect, train_time=0.01)
    stats = loop.stats()
  assert stats["max_lag"] <= tau
  rejected = stats["dropped_stale"] if mode == "drop" else stats["dropped_stale"] + stats["masked"]
  assert rejected > 0 and (stats["masked_tokens"] > 0) == (stats["masked"] > 0)
  assert stats["dropped_stale"] == sum(count for name, count in stats.items() if name.startswith("dropped_stale/"))


def test_paused_consumer_does_not_block_the_event_loop_and_nothing_vanishes():
  # 10 times the batch is produced before the first take; surplus stays queued in order of completion.
  order, sampler = [], FakeSampler(delay=jitter)
  loop = make_loop(sampler=sampler, admission_staleness=9, slots=5)
  put = loop.buffer.put
  loop.buffer.put = lambda trajectory: order.append(trajectory.rollout_id) or put(trajectory)
  with Running(loop):
    while len(loop.buffer) < 40:
      time.sleep(0.001)
    loop.stats()
    time.sleep(0.3)
    assert loop.stats()["max_event_loop_gap"] < 0.5
    taken = [sorted(order[i : i + 4]) for i in range(0, 40, 4)]
    for expected in taken:
      assert [trajectory.rollout_id for trajectory in loop.buffer.take(4, 0, timeout=20)] == expected
    assert loop.stats()["submitted"] == 40  # everything is in training: no capacity yet
    for _ in taken:
      loop.on_version(0)
    assert loop.stats()["trained"] == 40


def test_event_loop_gap_is_measured():
  async def busy():
    time.sleep(0.3)
    return np.int32([5, 6])

  with Running(make_loop(lambda: FakeEnvironment(faults={"reset": busy}), slots=1)) as loop:
    loop.buffer.take(1, 0, timeout=20)
    assert loop.stats()["max_event_loop_gap"] >= 0.2


def test_large_buffer_is_saved_outside_the_lock():
  loop = make_loop(batch_size=64, admission_staleness=4)
  fill(loop.buffer, *(make_trajectory(i) for i in range(300)))
  state, arrays = loop.state_dict()
  assert len(state["trajectories"]) == 300 and arrays["token_ids"].shape == (300 * 8,)


def test_identity_under_random_failures():
  rng = np.random.default_rng(0)

  async def maybe_fail(*_):
    kind = rng.integers(5)
    if kind == 0:
      raise InfrastructureFailure("fake", "gone")
    if kind == 1:
      raise EnvironmentFailure("fake", "broken")
    if kind == 2:
      return "garbage"
    return np.int32([5, 6, 7])

  sampler = FakeSampler(delay=jitter)
  loop = make_loop(
    lambda: FakeEnvironment(turns=1, faults={"reset": maybe_fail}),
    sampler,
    max_staleness=1,
    admission_staleness=3,
    environment_retries=1,
  )
  with Running(loop):
    train(loop, sampler, 25, train_time=0.002)
    check_identity(loop.stats())
  stats = loop.stats()
  check_identity(stats)
  assert stats["trained"] == 100 and stats["failed_infrastructure"] > 0 and stats["failed_environment"] > 0
  assert stats["in_flight"] == stats["in_training"] == 0 and stats["retries"] > 0
  outcomes = ("trained", "failed_infrastructure", "failed_environment", "dropped_stale", "aborted")
  assert stats["submitted"] == sum(stats[name] for name in outcomes) + stats["buffered"]
  assert not sampler.open


def test_aborted_rollouts_never_reach_the_buffer():
  environments = []

  def make():
    environments.append(FakeEnvironment())
    return environments[-1]

  sampler = FakeSampler(delay=lambda rollout_id: 0.0 if rollout_id < 2 else 3600.0)
  loop = make_loop(make, sampler, slots=5)
  with Running(loop):
    while len(sampler.requests) < 9:  # two episodes of two turns, and the first turns of five more
      time.sleep(0.001)
  stats = loop.stats()
  check_identity(stats)
  assert (stats["buffered"], stats["in_flight"], stats["aborted"]) == (2, 0, 5)
  assert not sampler.open and all(environment.closed for environment in environments)
  with pytest.raises(LoopStopped):
    loop.buffer.take(4, 0)


@pytest.mark.parametrize("count, batches", [(0, 0), (3, 0), (8, 2), (10, 2)])
def test_prompts_that_end(count, batches):
  sampler = FakeSampler(delay=jitter)
  with Running(make_loop(sampler=sampler, prompts=FakePrompts(count))) as loop:
    version = train(loop, sampler, batches)
    with pytest.raises(PromptsExhausted):
      loop.buffer.take(4, version, timeout=20)
    loop.check()  # the end of the prompts is no fault


def test_statistics_of_idle_times_and_latency():
  sampler = FakeSampler(delay=lambda rollout_id: 0.02)
  with Running(make_loop(sampler=sampler, slots=2)) as loop:
    train(loop, sampler, 3)
    stats = loop.stats()
  assert stats["trainer_wait_seconds"] > 0.05
  assert 0 <= stats["slots_idle_fraction"] < 1
  assert stats["mean_used_latency"] >= 0.04 and stats["used"] == 12
  assert sum(stats["token_lags"].values()) == stats["used_tokens"]


def test_a_loop_can_be_stopped_before_it_starts_and_twice():
  loop = make_loop()
  loop.stop()
  loop.stop()
  assert loop.stats()["submitted"] == 0


def test_value_pretraining_uses_batches_without_new_versions():
  sampler = FakeSampler()
  with Running(make_loop(sampler=sampler, admission_staleness=0)) as loop:
    for _ in range(3):
      loop.buffer.take(4, 0, timeout=20)
      loop.on_version(0)
    assert loop.stats()["trained"] == 12


def test_one_slow_rollout_holds_up_nobody():
  release = threading.Event()

  async def wait(request):
    while not release.is_set():
      await asyncio.sleep(0.001)

  sampler = FakeSampler()
  generate = sampler.generate

  async def slow_generate(request):
    if request.rollout_id == 0:
      await wait(request)
    return await generate(request)

  sampler.generate = slow_generate
  with Running(make_loop(sampler=sampler, slots=2, admission_staleness=1)) as loop:
    version = train(loop, sampler, 5)
    release.set()
    late = []
    while not late:
      batch = loop.buffer.take(4, version, timeout=20)
      late = [trajectory for trajectory in batch if trajectory.rollout_id == 0]
      version += 1
      sampler.version = version
      loop.on_version(version)
  assert late[0].oldest_version >= 5  # nothing of it was sampled earlier, so it is fresh
