"""The contract of the asynchronous loop, end to end: where every rollout ends, what it counts for, what it may cost."""

from __future__ import annotations

import asyncio
import copy
import heapq
import json
import math
import time

import numpy as np
import pytest
from toys.rollout_fakes import (
  FakeEnvironment,
  FakePrompts,
  FakeSampler,
  Running,
  completion,
  fill,
  make_buffer,
  make_loop,
  make_trajectory,
  submit,
  train,
)
from toys.sampler_fakes import drain, make, request

from sao_jax.environments.base import StepResult
from sao_jax.environments.wrappers import Chaos
from sao_jax.episode import GraderFailure, InfrastructureFailure, Status
from sao_jax.rollout import outages
from sao_jax.rollout.outcomes import Outcome, check_identity


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
  monkeypatch.setattr(outages, "LONGEST_PAUSE", 0.001)


def wait_until(condition) -> None:
  deadline = time.monotonic() + 20
  while not condition():
    assert time.monotonic() < deadline, "waited in vain"
    time.sleep(0.001)


@pytest.mark.parametrize("version", [0, 1, 5, 10, 50])
@pytest.mark.parametrize("eta, batch_size", [(2, 16), (0, 1), (4, 3)])
def test_admission_after_a_restore_does_not_depend_on_the_version(eta, batch_size, version):
  config = {"batch_size": batch_size, "admission_staleness": eta}
  sampler = FakeSampler()
  with Running(make_loop(sampler=sampler, **config)) as loop:
    train(loop, sampler, version, batch_size=batch_size)
  sampler = FakeSampler(delay=lambda _: 3600.0, version=version)
  resumed = make_loop(sampler=sampler, slots=1000, **config)
  resumed.load_state_dict(*json_round_trip(loop.state_dict()))
  stats = resumed.stats()
  limit = (eta + 1) * batch_size
  assert stats["capacity"] + stats["in_flight"] + stats["buffered"] == limit
  assert stats["trained"] == version * batch_size
  with Running(resumed):  # what was under way starts again, with as much more as the bound allows
    wait_until(lambda: len(sampler.open) + len(resumed.buffer) == limit)
    stats = resumed.stats()
    assert (stats["in_flight"], stats["capacity"]) == (len(sampler.open), 0)


def json_round_trip(state):
  return json.loads(json.dumps(state[0])), state[1]


@pytest.mark.parametrize("sampled, trained", [(7, 11), (0, 0), (3, 3), (0, 5), (50, 51)])
def test_lag_counts_the_time_in_the_queue(sampled, trained):
  sampler = FakeSampler(version=sampled)
  loop = make_loop(sampler=sampler)
  loop.buffer.set_version(sampled)
  with Running(loop):
    wait_until(lambda: len(loop.buffer) == 12)
    sampler.version = trained
    for version in range(sampled, trained):
      loop.on_version(version + 1)
    batch = loop.buffer.take(4, trained, timeout=20)
    loop.on_version(trained + 1)
    stats = loop.stats()
  assert {int(v) for t in batch for v in t.policy_version[t.action_mask]} == {sampled}
  assert (stats["max_lag"], stats["mean_lag"]) == (trained - sampled, trained - sampled)
  assert stats["token_lags"] == {trained - sampled: stats["used_tokens"]}


class FakeSpec:
  """The settings of the fake environment."""

  name = "fake"

  def make(self, tokenizer):
    return FakeEnvironment()


@pytest.mark.parametrize("eta, slots, tau", [(0, 3, -1), (2, 8, -1), (2, 8, 0), (4, 32, 1)])
def test_whatever_becomes_of_rollouts_their_capacity_comes_back(eta, slots, tau):
  chaos = Chaos(FakeSpec(), raises=0.2, garbage=0.1, kills=0.05, hangs=0.05, seed=eta)

  def reply(request):
    if request.rollout_id % 7 == 3:
      return completion([7, 2], logprobs=[-0.5, math.nan])
    return sampler.answer(request)

  sampler = FakeSampler(reply=reply)
  loop = make_loop(
    lambda: chaos.make(None),
    sampler,
    FakePrompts(120),
    slots=slots,
    admission_staleness=eta,
    max_staleness=tau,
    environment_timeout=0.3,
  )
  version = 0
  with Running(loop):
    while True:
      stats = loop.stats()
      if stats["submitted"] == 120 and not stats["in_flight"] and stats["buffered"] < 4:
        break
      if stats["buffered"] >= 4:
        version = train(loop, sampler, 1, version=version)
      time.sleep(0.001)
    stats = loop.stats()
  assert not stats["in_flight"] and not stats["in_training"] and not sampler.open
  assert stats["capacity"] == (eta + 1) * 4 - stats["buffered"]
  failed = stats["failed_infrastructure"] + stats["failed_environment"]
  assert stats["trained"] + stats["filtered"] + failed + stats["dropped_stale"] + stats["buffered"] == 120
  for outcome in ("trained", "filtered", "failed_infrastructure", "failed_environment"):
    assert stats[outcome] > 5 or tau >= 0  # with a tight bound, much is cancelled before it can fail
  by_reason = sum(count for name, count in stats.items() if "/" in name)
  assert by_reason == stats["filtered"] + failed + stats["dropped_stale"]


def test_the_samplers_caller_keeps_its_options():
  for policy in ("keep", "reprefill"):
    engine, scheduler = make(num_slots=1, decode_steps=2, kv_after_publish=policy)
    asked = [request(session, max_tokens=9, rollout=session, stop_ids=(96,)) for session in range(3)]
    before, results = copy.deepcopy(asked), []
    for one in asked:
      scheduler.submit(one, results.append)
    for version in range(1, 6):  # interrupted by new weights again and again
      scheduler.tick()
      scheduler.publish(None, version)
    drain(scheduler)
    assert asked == before and len(results) == 3 and len(engine.log) > 6
    assert all(len(result.token_ids) == 9 or result.token_ids[-1] == 96 for result in results)


@pytest.mark.parametrize("interrupted_every", [2000, 4096, 8192, 7])
@pytest.mark.parametrize("budget", [8192, 1, 2001])
def test_a_token_budget_over_interruptions_is_exact(budget, interrupted_every):
  # Every 'turn' is one piece of the answer: the budget of the next is what is left.
  sampler = FakeSampler(reply=lambda request: completion([7] * (request.max_tokens - 1) + [2]))
  loop = make_loop(
    lambda: FakeEnvironment(turns=10**6, observed=0),
    sampler,
    FakePrompts(1),
    batch_size=1,
    context_length=10**5,
    row_lengths=(10**5,),
    max_tokens=budget,
    max_tokens_per_turn=interrupted_every,
    max_turns=10**6,
  )
  with Running(loop):
    (trajectory,) = loop.buffer.take(1, 0, timeout=60)
  assert trajectory.num_sampled == budget and trajectory.status is Status.TRUNCATED_LENGTH
  assert [r.max_tokens for r in sampler.requests] == [
    min(interrupted_every, budget - done) for done in range(0, budget, interrupted_every)
  ]
  assert {r.temperature for r in sampler.requests} == {1.0}


def outcome_counts(stats) -> dict[str, int]:
  return {outcome.value: stats[outcome.value] for outcome in Outcome if stats[outcome.value]}


async def sandbox_not_created():
  raise OSError("no space left on device")


async def server_gone():
  raise ConnectionRefusedError("nobody listens")


async def grader_crashed():
  raise GraderFailure("fake", "segmentation fault")


async def typed_failure():
  raise InfrastructureFailure("fake", "evicted")


async def unknown():
  raise LookupError("what is this")


@pytest.mark.parametrize(
  "where, fault, outcome",
  [
    ("reset", sandbox_not_created, "failed_infrastructure"),
    ("reset", typed_failure, "failed_infrastructure"),
    ("step", server_gone, "failed_infrastructure"),
    ("step", grader_crashed, "failed_infrastructure"),
    ("on_truncated", grader_crashed, "failed_infrastructure"),
    ("step", unknown, "failed_environment"),
    ("on_truncated", unknown, "failed_environment"),
  ],
)
def test_what_failed_is_in_no_statistic(where, fault, outcome, caplog):
  def make_environment():
    made.append(None)
    broken = len(made) % 2 == 0
    return FakeEnvironment(turns=99 if where == "on_truncated" else 2, faults={where: fault} if broken else {})

  made: list[None] = []
  sampler = FakeSampler()
  loop = make_loop(make_environment, sampler, FakePrompts(40), slots=1, admission_staleness=0)
  with Running(loop):
    train(loop, sampler, 5)
    wait_until(lambda: loop.stats()["submitted"] == 40 and not loop.stats()["in_flight"])
    stats = loop.stats()
  assert outcome_counts(stats) == {"trained": 20, outcome: 20}
  assert stats["generated"] == stats["used"] == 20
  assert stats["generated_tokens"] == stats["used_tokens"] == sum(stats["token_lags"].values())
  alarms = [record for record in caplog.records if record.levelname == "ERROR"]
  assert len(alarms) == (20 if fault is unknown else 0)


async def out_of_its_own_time():
  return StepResult([], True, 0.125)  # the environment's clock: graded on what there is


async def program_is_broken():
  return StepResult([], True, 0.0)


@pytest.mark.parametrize(
  "limits, faults, status, reward",
  [
    ({"max_turns": 2}, {}, Status.TRUNCATED_TURNS, 0.25),
    ({"max_tokens": 7, "max_turns": 99}, {}, Status.TRUNCATED_LENGTH, 0.25),
    ({"max_tokens_per_turn": 1}, {}, Status.TRUNCATED_LENGTH, 0.25),
    ({"context_length": 10, "max_turns": 99}, {}, Status.TRUNCATED_CONTEXT, 0.25),
    ({}, {"step": out_of_its_own_time}, Status.TERMINATED, 0.125),
    ({}, {"step": program_is_broken}, Status.TERMINATED, 0.0),
  ],
)
def test_what_the_agent_did_wrong_is_graded_and_trained(limits, faults, status, reward):
  seen = set()
  sampler = FakeSampler(reply=lambda r: completion([7, 8, 2][: r.max_tokens], stop_ids=r.stop_ids))
  loop = make_loop(lambda: FakeEnvironment(turns=99, observed=1, faults=faults), sampler, FakePrompts(8), **limits)
  with Running(loop):
    train(loop, sampler, 2, inspect=lambda batch, _: seen.update((t.status, t.reward) for t in batch))
    stats = loop.stats()
  assert seen == {(status, reward)}
  assert outcome_counts(stats) == {"trained": 8}


@pytest.mark.parametrize("cut", [Status.TRUNCATED_TURNS, None])
def test_masked_is_counted_apart_from_trained_and_says_why(cut):
  status = cut or Status.TERMINATED
  buffer = make_buffer(batch_size=4, max_staleness=2, staleness="mask", train_truncated=False, version=3)
  fill(
    buffer,
    make_trajectory(0, version=[0, 1, 2, 3]),  # one token of lag 3
    make_trajectory(1, version=3),
    make_trajectory(2, version=3, status=status),
    make_trajectory(3, version=[0, 0, 3, 3], status=status),
  )
  batch = buffer.take(4, 3)
  assert [t.num_trained for t in batch] == ([3, 4, 0, 0] if cut else [3, 4, 4, 2])
  buffer.batch_done(4)
  counters = buffer.ledger.counters()
  check_identity(counters)
  reasons = {"masked/over-age tokens": 1, "masked/all tokens": 2} if cut else {"masked/over-age tokens": 2}
  assert {name: count for name, count in counters.items() if "/" in name} == reasons
  assert counters["masked"] == sum(reasons.values()) and counters["trained"] == 4 - counters["masked"]
  summary = buffer.statistics.summary()
  assert summary["used"] == 4 and summary["masked_tokens"] == 16 - summary["used_tokens"]
  assert summary["used_tokens"] == sum(summary["token_lags"].values()) == (7 if cut else 13)


def test_a_whole_batch_may_be_masked():
  buffer = make_buffer(batch_size=2, train_truncated=False)
  fill(buffer, *(make_trajectory(i, status=Status.TRUNCATED_LENGTH) for i in range(2)))
  assert [t.num_trained for t in buffer.take(2, 0)] == [0, 0]
  buffer.batch_done(1)
  assert buffer.ledger.counters()["masked"] == 2 and buffer.statistics.summary()["max_lag"] == 0
  assert math.isnan(buffer.statistics.summary()["mean_lag"])


@pytest.mark.parametrize("where", ["reset", "generate", "step", "on_truncated"])
def test_what_is_cut_by_the_end_of_the_loop_never_looks_finished(where):
  async def wait(*_):
    waiting.append(None)
    await asyncio.sleep(3600)

  waiting: list[None] = []
  sampler = FakeSampler()
  if where == "generate":
    sampler.generate = wait
  faults = {} if where == "generate" else {where: wait}
  loop = make_loop(lambda: FakeEnvironment(turns=99, faults=faults), sampler, slots=5, environment_timeout=3600.0)
  with Running(loop):
    wait_until(lambda: len(waiting) == 5)
  stats = loop.stats()
  check_identity(stats)
  assert outcome_counts(stats) == {"aborted": 5} and stats["generated"] == len(loop.buffer) == 0
  state, arrays = loop.state_dict()
  assert [number for number, _, _ in state["intake"]["unfinished"]] == list(range(5))
  assert state["buffer"]["admission"]["in_flight"] == 5 and not arrays and not sampler.open


@pytest.mark.parametrize("reason", ["abort", "cancelled", "", None])
def test_an_answer_that_the_sampler_cut_itself_is_never_taken_for_a_finished_one(reason):
  sampler = FakeSampler(reply=lambda r: completion([7, 8], finish_reason=reason or "?"))
  loop = make_loop(sampler=sampler, prompts=FakePrompts(6), slots=2)
  with Running(loop):
    wait_until(lambda: loop.stats()["filtered"] == 6)
    assert loop.stats()["filtered/unknown finish reason"] == 6 and len(loop.buffer) == 0


def simulate(staleness: str, tau: int, steps: int = 200) -> dict:
  """A run in virtual time: 32 slots, log-normal latencies, lengths in proportion, a train step that takes no time."""
  rng = np.random.default_rng(0)
  buffer = make_buffer(batch_size=4, eta=8, max_staleness=tau, staleness=staleness)
  running: list[tuple[float, int, float]] = []
  now, count, version, published = 0.0, 0, 0, [0.0]
  while version < steps:
    while len(running) < 32 and submit(buffer.ledger, count):
      latency = float(rng.lognormal(sigma=1.5))
      heapq.heappush(running, (now + latency, count, latency))
      count += 1
    now, number, latency = heapq.heappop(running)
    length = math.ceil(4 * latency)
    sampled_at = now - latency * np.linspace(1.0, 0.0, length, endpoint=False)
    versions = (np.searchsorted(published, sampled_at, side="right") - 1).clip(0).tolist()
    buffer.put(make_trajectory(number, turns=((length, 0),), version=versions, info={"latency": latency}))
    while len(buffer) >= 4 and version < steps:
      try:
        buffer.take(4, version, timeout=0)
      except TimeoutError:
        break
      version += 1
      buffer.batch_done(version)
      published.append(now)
  check_identity(buffer.ledger.counters())
  return buffer.statistics.summary() | buffer.ledger.counters()


def test_a_hard_bound_shortens_the_data_and_the_statistics_say_so():
  dropping, masking, unbounded = simulate("drop", 2), simulate("mask", 2), simulate("drop", -1)
  ratio = lambda stats: stats["mean_used_latency"] / stats["mean_generated_latency"]
  assert unbounded["dropped_stale"] == 0 and ratio(unbounded) == pytest.approx(1.0, abs=0.05)
  assert ratio(dropping) < 0.6  # long answers vanish, though every batch was full
  assert ratio(masking) > 0.9 and masking["masked_tokens"] > 0
  rates = dropping["drop_rate_by_length"]
  assert min(rates[32], rates[64]) > 5 * max(rates[1], rates[2], rates[4])
  assert dropping["dropped_stale"] == sum(dropping["dropped_by_length"].values())
  assert dropping["max_lag"] <= 2 and masking["max_lag"] <= 2 < unbounded["max_lag"]
  # A bound of four times the mean lag costs little.
  generous = simulate("drop", math.ceil(4 * unbounded["mean_lag"]))
  assert generous["dropped_stale"] < 0.05 * generous["submitted"] < 0.5 * dropping["dropped_stale"]
