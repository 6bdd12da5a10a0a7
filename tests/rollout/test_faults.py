"""Faults: what environments do wrong costs one rollout; what else goes wrong reaches the trainer as itself."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time

import pytest
from toys.rollout_fakes import FakeEnvironment, FakePrompts, FakeSampler, Running, completion, make_loop, train

from sao_jax.environments.base import StepResult
from sao_jax.episode import GraderFailure, InfrastructureFailure
from sao_jax.rollout import outages
from sao_jax.rollout.outcomes import EnvironmentDown, NothingButBadEvidence, RolloutSilent

# A background exception reaches the trainer within this many seconds.
PROMPTLY = 5.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
  monkeypatch.setattr(outages, "LONGEST_PAUSE", 0.001)


async def hang():
  await asyncio.sleep(3600)


async def raise_value_error():
  raise ValueError("bug")


async def raise_infrastructure():
  raise InfrastructureFailure("fake", "server gone")


async def raise_grader():
  raise GraderFailure("fake", "crashed")


async def return_garbage():
  return {"not": "a result"}


async def return_nan_reward():
  return StepResult([], True, float("nan"))


FAULTS = [
  ({"reset": raise_value_error}, "failed_environment/UnexpectedFailure(ValueError)", False),
  ({"reset": raise_infrastructure}, "failed_infrastructure/InfrastructureFailure", True),
  ({"reset": return_garbage}, "failed_environment/EnvironmentFailure", False),
  ({"reset": hang}, "failed_infrastructure/EnvironmentTimeout", True),
  ({"step": raise_value_error}, "failed_environment/UnexpectedFailure(ValueError)", False),
  ({"step": raise_infrastructure}, "failed_infrastructure/InfrastructureFailure", True),
  ({"step": raise_grader}, "failed_infrastructure/GraderFailure", False),
  ({"step": return_garbage}, "failed_environment/EnvironmentFailure", False),
  ({"step": return_nan_reward}, "failed_infrastructure/GraderFailure", False),
  ({"step": hang}, "failed_infrastructure/EnvironmentTimeout", False),
]


@pytest.mark.parametrize("faults, reason, retryable", FAULTS)
def test_every_kind_of_fault_costs_one_rollout_and_the_batch_still_fills(faults, reason, retryable):
  environments = []

  def make():
    # One of four environments is broken.
    broken = len(environments) % 4 == 1
    environments.append(FakeEnvironment(faults=faults if broken else {}))
    return environments[-1]

  sampler = FakeSampler()
  loop = make_loop(make, sampler, environment_timeout=0.05, environment_retries=0)
  with Running(loop):
    train(loop, sampler, 3)
    while reason not in loop.stats():  # the trainer may be done before the first time-out
      time.sleep(0.001)
    stats = loop.stats()
  assert stats["trained"] == 12 and stats[reason] >= 1
  assert not sampler.open and all(environment.closed for environment in environments)


@pytest.mark.parametrize("faults, reason, retryable", FAULTS)
def test_bounded_retries_of_what_is_retryable(faults, reason, retryable):
  made = []

  def make():
    made.append(FakeEnvironment(faults=faults))
    return made[-1]

  loop = make_loop(make, prompts=FakePrompts(1), slots=1, environment_timeout=0.03, environment_retries=2)
  with Running(loop):
    while loop.stats()["in_flight"] or not loop.stats()["submitted"]:
      time.sleep(0.001)
    stats = loop.stats()
  assert len(made) == (3 if retryable else 1) and stats["retries"] == len(made) - 1
  assert stats["submitted"] == stats[reason] == 1


@pytest.mark.parametrize("stop_ids", [(100,), (-1,), ("x",), (None,), (2.5,), tuple(range(9)), None])
def test_stop_ids_that_are_none_cost_one_rollout_and_never_reach_the_sampler(stop_ids):
  made, sampler = [], FakeSampler()

  def make():
    made.append(FakeEnvironment())
    if len(made) == 2:
      made[-1].stop_ids = stop_ids
    return made[-1]

  loop = make_loop(make, sampler, admission_staleness=0)
  with Running(loop):
    train(loop, sampler, 1)
    counters = loop.ledger.counters()
  assert (counters["trained"], counters["failed_environment"]) == (4, 1)
  assert {request.stop_ids for request in sampler.requests} == {(2,)}


def test_a_retry_has_the_same_rollout_id_a_fresh_environment_and_session():
  attempts = []

  def make():
    attempts.append(FakeEnvironment(turns=1, faults={"step": raise_infrastructure} if not attempts else {}))
    return attempts[-1]

  sampler = FakeSampler()
  with Running(make_loop(make, sampler, prompts=FakePrompts(1), environment_retries=2, batch_size=1)) as loop:
    (trajectory,) = loop.buffer.take(1, 0, timeout=20)
  first, second = sampler.requests
  assert first.rollout_id == second.rollout_id == trajectory.rollout_id == 0
  assert first.session_id != second.session_id
  assert attempts[0].actions[0].tolist() == trajectory.token_ids[trajectory.action_mask].tolist()


@pytest.mark.parametrize("where", ["make", "reset", "step"])
def test_nothing_but_failures_for_long_stop_the_run_with_the_environments_name(where):
  error = RuntimeError("original")

  async def fail():
    raise error

  def make():
    if where == "make":
      raise error
    return FakeEnvironment(faults={where: fail})

  loop = make_loop(make, prompts=FakePrompts(name="broken-shell"), outage_seconds=0.1)
  with Running(loop):
    began = time.monotonic()
    with pytest.raises(EnvironmentDown, match="'broken-shell': all .* attempts in 0.1.* s failed.*original") as caught:
      loop.buffer.take(4, 0, timeout=20)
    assert time.monotonic() - began < PROMPTLY
  assert caught.value.__cause__.__cause__ is error


def test_a_success_in_between_ends_the_outage():
  made = []

  def make():
    made.append(None)
    return FakeEnvironment(faults={} if len(made) % 4 == 0 else {"reset": raise_value_error})

  sampler = FakeSampler()
  with Running(make_loop(make, sampler, slots=1)) as loop:
    train(loop, sampler, 3)
    assert loop.stats()["failed_environment"] >= 36


def test_bad_evidence_is_filtered_by_reason_and_for_ever_stops_the_run():
  def reply(request):
    bad = request.rollout_id % 2 == 0 or request.rollout_id > 80  # beyond what three steps admit
    return completion([7, 2], logprobs=[-0.5, float("nan") if bad else -0.5])

  sampler = FakeSampler(reply=reply)
  with Running(make_loop(sampler=sampler, slots=1)) as loop:
    train(loop, sampler, 3)
    assert loop.stats()["filtered/log-prob not finite"] >= 10
    with pytest.raises(NothingButBadEvidence, match="256 rollouts in a row .* log-prob not finite"):
      train(loop, sampler, 10, version=3)


def test_out_of_turns_and_tokens_is_graded_and_trained_not_failed():
  sampler = FakeSampler()
  with Running(make_loop(lambda: FakeEnvironment(turns=99), sampler)) as loop:
    batch = loop.buffer.take(4, 0, timeout=20)
    stats = loop.stats()
  assert all(trajectory.status.truncated and trajectory.reward == 0.25 for trajectory in batch)
  assert stats["failed_environment"] == stats["failed_infrastructure"] == 0


def test_unknown_failures_are_logged_as_errors_with_their_traceback(caplog):
  def make():
    return FakeEnvironment(faults={"step": raise_value_error})

  with Running(make_loop(make, slots=1, outage_seconds=0.05)) as loop, pytest.raises(EnvironmentDown):
    loop.buffer.take(4, 0, timeout=20)
  record = next(record for record in caplog.records if record.levelname == "ERROR")
  assert "ValueError: bug" in record.message and record.exc_info is not None


def test_a_failing_or_hanging_close_holds_up_nobody(caplog):
  made = []

  def make():
    made.append(FakeEnvironment(faults={"close": hang if len(made) % 2 else raise_value_error}))
    return made[-1]

  sampler = FakeSampler()
  with Running(make_loop(make, sampler, slots=2, environment_timeout=0.2)) as loop:
    train(loop, sampler, 3)
  assert loop.stats()["trained"] == 12
  assert any("was not closed: environment 'fake': close raised" in record.message for record in caplog.records)


class Original(Exception):
  """Raised somewhere in the background."""


def test_what_the_sampler_raises_reaches_a_blocked_take_as_itself():
  error = Original("device lost")

  def reply(request):
    if request.rollout_id > 3:
      raise error
    return completion([7, 2])

  sampler = FakeSampler(reply=reply)
  with Running(make_loop(sampler=sampler, admission_staleness=0)) as loop:
    loop.buffer.take(4, 0, timeout=20)
    began = time.monotonic()
    loop.on_version(1)
    with pytest.raises(Original) as caught:
      loop.buffer.take(4, 1, timeout=20)
    assert caught.value is error and time.monotonic() - began < PROMPTLY
    with pytest.raises(Original):
      loop.check()
  assert loop.error is error


def test_what_the_prompt_iterator_raises_reaches_the_trainer_as_itself():
  class Prompts(FakePrompts):
    def __next__(self):
      if self.position == 6:
        raise Original("disk")
      return super().__next__()

  sampler = FakeSampler()
  with Running(make_loop(sampler=sampler, prompts=Prompts(), admission_staleness=0)) as loop:
    loop.buffer.take(4, 0, timeout=20)
    loop.on_version(1)
    with pytest.raises(Original):
      loop.buffer.take(4, 1, timeout=20)


def test_a_sampler_that_dies_while_nobody_asks_it_anything_is_noticed():
  async def think():
    await asyncio.sleep(3600)

  sampler = FakeSampler()
  with Running(make_loop(lambda: FakeEnvironment(faults={"step": think}), sampler, environment_timeout=3600)) as loop:
    threading.Timer(0.1, lambda: setattr(sampler, "error", Original("publisher died"))).start()
    began = time.monotonic()
    with pytest.raises(Original):
      loop.buffer.take(4, 0, timeout=20)
    assert time.monotonic() - began < PROMPTLY


def test_a_killed_environment_process_is_an_infrastructure_failure():
  # The worker answers one line per action; it is killed before it can.
  class Remote(FakeEnvironment):
    async def reset(self, prompt):
      self.process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=subprocess.PIPE, stdout=subprocess.PIPE
      )
      return await super().reset(prompt)

    async def step(self, action_ids):
      self.process.kill()
      answer = await self.process.stdout.readline()
      if not answer:
        raise ConnectionResetError("the environment's process has ended")
      return await super().step(action_ids)

    async def close(self):
      await self.process.wait()

  with Running(make_loop(Remote, slots=1, outage_seconds=0.2)) as loop:
    with pytest.raises(EnvironmentDown, match="process has ended"):
      loop.buffer.take(4, 0, timeout=20)
    assert loop.stats()["failed_infrastructure/InfrastructureFailure(ConnectionResetError)"] >= 2


def test_watchdog_ends_a_silent_run_with_queue_sizes_and_stacks():
  sampler = FakeSampler(delay=lambda rollout_id: 3600.0)
  with Running(make_loop(sampler=sampler, watchdog_seconds=0.2)) as loop, pytest.raises(RolloutSilent) as caught:
    loop.buffer.take(4, 0, timeout=20)
  message = str(caught.value)
  assert "'in_flight': 8" in message and "rollout 0: rollout_loop.py" in message and "generate" in message


def test_watchdog_sees_a_blocked_event_loop():
  released = threading.Event()

  async def block():
    released.wait(20)

  loop = make_loop(lambda: FakeEnvironment(faults={"reset": block}), watchdog_seconds=0.2)
  with Running(loop):
    with pytest.raises(RolloutSilent, match="released.wait"):
      loop.buffer.take(4, 0, timeout=20)
    released.set()


class Clock:
  """A watchdog's clock that a test sets, and looks that it makes."""

  def __init__(self, loop, monkeypatch):
    self.now, self.loop = 0.0, loop
    monkeypatch.setattr(loop._activity, "_clock", lambda: self.now)
    loop._activity.note()

  def look_after(self, seconds: float) -> None:
    self.now += seconds
    self.loop._look()


def test_watchdog_takes_tokens_that_are_decoded_for_activity(monkeypatch):
  sampler = FakeSampler(delay=lambda rollout_id: 3600.0)
  sampler.progress = 0
  loop = make_loop(sampler=sampler, watchdog_seconds=600.0)
  with Running(loop):
    while len(sampler.requests) < 8:
      time.sleep(0.001)
    clock = Clock(loop, monkeypatch)
    for _ in range(10):  # an hour and a half without an answer, a token every ten minutes
      sampler.progress += 1
      clock.look_after(550.0)
    with pytest.raises(RolloutSilent, match="nothing has happened for 601 s"):
      clock.look_after(601.0)


def test_watchdog_is_patient_while_the_trainer_computes_and_not_while_it_waits(monkeypatch):
  sampler = FakeSampler(delay=lambda rollout_id: 0.0 if rollout_id < 4 else 3600.0)
  loop = make_loop(sampler=sampler, watchdog_seconds=600.0)
  with Running(loop):
    loop.buffer.take(4, 0, timeout=20)
    while len(sampler.requests) < 16:
      time.sleep(0.001)
    clock = Clock(loop, monkeypatch)
    clock.look_after(10_000.0)  # a long step, perhaps on the sampler's own device
    waits = threading.Thread(target=lambda: pytest.raises(RolloutSilent, loop.wait_until_idle))
    waits.start()
    while not loop._awaited:
      time.sleep(0.001)
    with pytest.raises(RolloutSilent) as caught:
      clock.look_after(601.0)
    loop._fail(caught.value)
    waits.join()


def test_watchdog_does_not_take_a_loop_that_admits_nothing_for_healthy(monkeypatch):
  loop = make_loop(admission_staleness=0, watchdog_seconds=600.0)
  monkeypatch.setattr(loop, "_start_rollouts", lambda: None)  # whatever may keep it from starting any
  with Running(loop):
    clock = Clock(loop, monkeypatch)
    with pytest.raises(RolloutSilent, match="'submitted': 0"):
      clock.look_after(601.0)


@pytest.mark.parametrize("prompts", [4, 10**9])
def test_watchdog_waits_for_a_trainer_without_end(prompts, monkeypatch):
  loop = make_loop(prompts=FakePrompts(prompts), admission_staleness=0, watchdog_seconds=600.0)
  with Running(loop):
    while len(loop.buffer) < 4:
      time.sleep(0.001)
    Clock(loop, monkeypatch).look_after(10_000.0)  # at capacity, or out of prompts


def test_watchdog_is_patient_with_a_slow_trainer():
  sampler = FakeSampler()
  with Running(make_loop(sampler=sampler, admission_staleness=0, watchdog_seconds=0.3)) as loop:
    train(loop, sampler, 1)
    while len(loop.buffer) < 4:
      time.sleep(0.001)
    time.sleep(1.0)
    train(loop, sampler, 1, version=1)


def test_a_cancelled_rollout_is_noticed():
  async def cancel_the_rollout():
    next(task for task in asyncio.all_tasks() if task.get_name() == "rollout 0").cancel()
    await asyncio.sleep(3600)

  loop = make_loop(lambda: FakeEnvironment(faults={"step": cancel_the_rollout}), slots=1)
  with Running(loop), pytest.raises(RuntimeError, match="cancelled from outside"):
    loop.buffer.take(4, 0, timeout=20)


def test_stop_leaves_a_hanging_environment_behind():
  async def hang_against_cancellation():
    while True:
      with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(3600)

  loop = make_loop(lambda: FakeEnvironment(faults={"step": hang_against_cancellation}), slots=1)
  with Running(loop):
    while not loop.stats()["in_flight"]:
      time.sleep(0.001)
    began = time.monotonic()
  assert time.monotonic() - began < PROMPTLY
  assert loop.stats()["aborted"] == 1
