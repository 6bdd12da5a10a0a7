"""What goes wrong in the background reaches the main loop as itself within five seconds; nothing blocks the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest
from toys import graders
from toys.rollout_fakes import FakeEnvironment, FakePrompts, FakeSampler, Running, completion, make_loop
from toys.sampler_fakes import FakeEngine

from sao_jax.config import SamplerConfig
from sao_jax.environments.base import StepResult
from sao_jax.interrupt import Interrupt
from sao_jax.rewards.grader_pool import GraderPool
from sao_jax.rollout import rollout_loop, watchdog
from sao_jax.rollout.outcomes import EnvironmentDown, RolloutSilent
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService
from sao_jax.training.rollouts import Rollouts

DEADLINE = 5.0  # seconds from the fault to the main loop
HEARTBEAT_GAP = 0.1  # seconds
PANIC = "UnexpectedFailure(OriginalBase)"  # the reason that such a rollout is counted under


class Original(Exception):
  """Raised somewhere in the background."""


class OriginalBase(BaseException):
  """The same, out of reach of `except Exception`."""


def name_of(error: BaseException) -> str:
  return type(error).__name__


def raising(error: BaseException):
  async def fault(*_):
    raise error.with_traceback(None)  # it would grow, each time that it is raised again

  return fault


def caught_by_the_main_loop(loop, version: int = 0) -> BaseException:
  """Waits for a batch as the training loop does, and returns what that raised, in time."""
  began = time.monotonic()
  with pytest.raises(BaseException) as caught:
    while True:  # what was finished before the fault
      Rollouts(loop, 4, Interrupt()).take(version)
      version += 1
      loop.on_version(version)
      assert time.monotonic() - began < 30, "no fault in sight"
  assert time.monotonic() - began < DEADLINE
  assert loop.error is caught.value or loop._sampler.error is caught.value
  return caught.value


ERRORS = [Original("here"), OriginalBase("here"), TimeoutError("here"), SystemExit(3), KeyboardInterrupt("here")]


@pytest.mark.parametrize("error", ERRORS, ids=name_of)
@pytest.mark.parametrize("where", ["producer", "sampler", "statistics"])
def test_an_exception_of_any_kind_reaches_the_main_loop_as_itself(where, error):
  class Prompts(FakePrompts):
    def __next__(self):
      if where == "producer" and self.position == 6:
        raise error
      return super().__next__()

  def reply(request):
    if where == "sampler" and request.rollout_id == 6:
      raise error
    return completion([7, 2])

  loop = make_loop(sampler=FakeSampler(reply=reply), prompts=Prompts(), admission_staleness=0)
  if where == "statistics":
    generated = loop.buffer.statistics.generated

    def generated_or_not(trajectory, num_sampled):
      if trajectory.rollout_id == 6:
        raise error
      generated(trajectory, num_sampled)

    loop.buffer.statistics.generated = generated_or_not
  with Running(loop):
    assert caught_by_the_main_loop(loop) is error


@pytest.mark.parametrize("error", ERRORS, ids=name_of)
@pytest.mark.parametrize("method", ["reset", "step", "on_truncated", "make"])
def test_what_an_environment_raises_costs_rollouts_and_in_the_end_the_run(method, error):
  def make():
    if method == "make":
      raise error.with_traceback(None)
    return FakeEnvironment(turns=99, faults={method: raising(error)})

  loop = make_loop(make, slots=1, outage_seconds=0.1)
  with Running(loop):
    caught = caught_by_the_main_loop(loop)
  if isinstance(error, SystemExit | KeyboardInterrupt):
    assert caught is error  # they keep their meaning
    return
  assert isinstance(caught, EnvironmentDown) and "failed (rollout.outage_seconds)" in str(caught)
  chain = [caught]
  while chain[-1].__cause__ is not None:
    chain.append(chain[-1].__cause__)
  assert chain[-1] is error
  assert loop.stats()["failed_environment"] + loop.stats()["failed_infrastructure"] >= 3


@pytest.mark.parametrize("method", ["make", "reset", "step", "on_truncated", "close"])
def test_a_panic_that_is_no_exception_costs_one_rollout_wherever_it_happens(method, caplog):
  made = []

  def make():
    made.append(None)
    broken = len(made) % 4 == 2
    if broken and method == "make":
      raise OriginalBase("here")
    return FakeEnvironment(turns=99, faults={method: raising(OriginalBase("here"))} if broken else {})

  sampler = FakeSampler()
  with Running(make_loop(make, sampler, admission_staleness=0, slots=1)) as loop:
    for version in range(3):
      assert len(Rollouts(loop, 4, Interrupt()).take(version)) == 4
      loop.on_version(version + 1)
  stats = loop.stats()
  assert stats["failed_environment"] == stats.get(f"failed_environment/{PANIC}", 0)
  assert stats["trained"] == 12 and (stats["failed_environment"] >= 3) == (method != "close")
  assert any("here" in record.message for record in caplog.records)


@pytest.mark.parametrize("method", ["reset", "close"])
def test_an_environment_that_leaves_the_interpreter_ends_the_run_in_order(method):
  error = SystemExit(3)
  waiting = []

  async def leave():
    while len(waiting) < 2:
      await asyncio.sleep(0.001)
    raise error

  async def wait():
    waiting.append(None)
    await asyncio.sleep(3600)

  def make():
    made.append(FakeEnvironment(turns=1, faults={method: leave} if not made else {"step": wait}))
    return made[-1]

  made = []
  loop = make_loop(make, slots=3)
  with Running(loop):
    assert caught_by_the_main_loop(loop) is error
  stats = loop.stats()
  assert stats["in_flight"] == 0 and stats["aborted"] >= 2  # they are saved, to be rolled out again
  assert all(environment.closed for environment in made)


class Engine(FakeEngine):
  """A fake engine that breaks where the test wants."""

  def __init__(self, where: str, error: BaseException):
    super().__init__(SamplerConfig(num_slots=4, context_length=64, decode_steps=4))
    self.where, self.error = where, error

  def _break(self, where: str) -> None:
    if self.where == where:
      raise self.error

  def extend(self, extensions, weights):
    self._break("extend")
    return super().extend(extensions, weights)

  def decode(self, num_steps, lengths, *others):
    self._break("decode")
    return super().decode(num_steps, lengths, *others)

  def publish(self, params, version):
    self._break("publish")
    super().publish(params, version)

  def check_params(self, params):
    self._break("check")


@pytest.mark.parametrize("error", [Original("here"), OriginalBase("here"), SystemExit(3)], ids=name_of)
@pytest.mark.parametrize("where", ["extend", "decode", "publish", "publish while nobody asks"])
def test_the_death_of_the_sampler_thread_is_noticed(where, error):
  where, _, idle = where.partition(" ")

  async def grade():  # its actions are cut
    await asyncio.sleep(3600.0 if idle else 0.001)
    return 1.0

  engine = Engine("", error)
  with SamplerService(Scheduler(engine)) as service:
    loop = make_loop(
      lambda: FakeEnvironment(turns=99, faults={"on_truncated": grade}),
      service,
      slots=4,
      admission_staleness=0,
      environment_timeout=3600.0,
      max_turns=1,
    )
    with Running(loop):
      if idle:
        while loop.stats()["in_flight"] < 4 or service.stats()["decoding_turns"]:
          time.sleep(0.001)
      else:
        assert len(Rollouts(loop, 4, Interrupt()).take(0)) == 4
      engine.where = where
      if where == "publish":
        service.publish(None, 1)
      if not idle:
        loop.on_version(1)
      assert caught_by_the_main_loop(loop, 0 if idle else 1) is error
    assert service.error is error
    with pytest.raises(type(error)):
      service.publish(None, 2)


def test_a_publish_that_the_sampler_refuses_raises_where_it_was_called():
  engine = Engine("check", Original("another model"))
  with SamplerService(Scheduler(engine)) as service:
    with pytest.raises(Original):
      service.publish(None, 1)
    assert service.error is None and service.version == 0


def test_a_killed_grader_process_costs_one_rollout_and_is_replaced():
  pool = GraderPool(graders.process_id, processes=1)
  workers: list[int] = []

  class Graded(FakeEnvironment):
    async def step(self, action_ids):
      if workers and len(workers) % 4 == 0:
        os.kill(workers[-1], signal.SIGKILL)
        workers.append(0)
      worker = await pool.grade("fake", *())
      workers.append(int(worker))
      return StepResult([], True, worker)

  sampler = FakeSampler()
  with Running(make_loop(Graded, sampler, slots=1, admission_staleness=0)) as loop:
    for version in range(4):
      assert len(Rollouts(loop, 4, Interrupt()).take(version)) == 4
      loop.on_version(version + 1)
    stats = loop.stats()
  pool.close()
  assert stats["trained"] == 16 and len(set(workers)) >= 3
  failed = stats.get("failed_infrastructure/GraderFailure", 0)  # none where its end was known before it was asked
  assert stats["failed_infrastructure"] == failed <= len(set(workers)) - 1


def test_a_grader_that_hangs_costs_its_rollout_and_holds_up_nobody():
  pool = GraderPool(graders.misbehave, processes=2, timeout=0.3)

  class Graded(FakeEnvironment):
    async def step(self, action_ids):
      hangs = self.prompt.key.id % 5 == 0
      return StepResult([], True, await pool.grade("fake", "hang" if hangs else "read"))

  sampler = FakeSampler()
  with Running(make_loop(Graded, sampler)) as loop:
    for version in range(3):
      batch = Rollouts(loop, 4, Interrupt()).take(version)
      assert all(trajectory.key.id % 5 and trajectory.reward == 0.0 for trajectory in batch)
      loop.on_version(version + 1)
    while not loop.stats()["failed_infrastructure"]:
      time.sleep(0.001)
    stats = loop.stats()
  pool.close()
  assert stats["trained"] == 12 and stats["failed_infrastructure/GraderFailure"] == stats["failed_infrastructure"]


def largest_gap(measure, attempts: int = 5) -> float:
  """The smallest of some measurements: other work on the machine makes gaps too."""
  gaps = []
  while len(gaps) < attempts and (not gaps or min(gaps) >= HEARTBEAT_GAP):
    gaps.append(measure())
  return min(gaps)


def test_the_event_loop_beats_while_a_reward_burns_two_seconds_of_cpu():
  # Patient: on a busy machine two seconds of the grader's CPU, which yields to others, take much longer.
  pool = GraderPool(graders.burn, processes=1, timeout=60.0)

  class Graded(FakeEnvironment):
    async def step(self, action_ids):
      return StepResult([], True, await pool.grade("fake", 2.0, 0.5))

  asyncio.run(pool.grade("fake", 0.0))  # the worker is up

  def measure() -> float:
    loop = make_loop(Graded, prompts=FakePrompts(1), slots=1, batch_size=1, environment_timeout=60.0)
    with Running(loop):
      loop.stats()
      (trajectory,) = loop.buffer.take(1, 0, timeout=120)
      assert trajectory.reward == 0.5 and trajectory.info["environment_seconds"] >= 2.0
      return loop.stats()["max_event_loop_gap"]

  assert largest_gap(measure) < HEARTBEAT_GAP
  pool.close()


def test_the_event_loop_beats_with_a_paused_consumer_and_ten_times_the_queue_produced():
  def measure() -> float:
    loop = make_loop(batch_size=64, admission_staleness=9, slots=32)
    with Running(loop):
      while len(loop.buffer) < 640:
        time.sleep(0.001)
      time.sleep(0.1)
      stats = loop.stats()
      assert stats["submitted"] == stats["buffered"] == stats["generated"] == 640 and stats["capacity"] == 0
      return stats["max_event_loop_gap"]

  assert largest_gap(measure) < HEARTBEAT_GAP


def test_the_watchdogs_own_fault_reaches_the_main_loop(monkeypatch):
  monkeypatch.setattr(watchdog, "PERIOD", 0.01)
  error = Original("in the watchdog")
  loop = make_loop(sampler=FakeSampler(delay=lambda rollout_id: 3600.0))
  loop._watchdog._look = lambda: (_ for _ in ()).throw(error)
  with Running(loop):
    assert caught_by_the_main_loop(loop) is error


@pytest.mark.parametrize("where", ["sampler", "step", "reset", "event loop"])
def test_silence_anywhere_ends_the_run_with_queue_sizes_and_stacks(where, monkeypatch):
  monkeypatch.setattr(watchdog, "PERIOD", 0.05)
  released = threading.Event()

  async def silent():
    if where == "event loop":
      released.wait(30)
    with contextlib.suppress(asyncio.CancelledError):
      await asyncio.sleep(3600)

  faults = {"reset" if where == "event loop" else where: silent}
  sampler = FakeSampler(delay=lambda rollout_id: 3600.0 if where == "sampler" else 0.0)
  loop = make_loop(lambda: FakeEnvironment(faults=faults), sampler, watchdog_seconds=1.0, environment_timeout=3600.0)
  with Running(loop):
    error = caught_by_the_main_loop(loop)
    released.set()
  assert isinstance(error, RolloutSilent)
  place = {"sampler": "generate", "event loop": "released.wait"}.get(where, "silent")
  for part in ("'submitted'", "'in_flight'", "'buffered': 0", place):
    assert part in str(error)


class BrokenPrompts(FakePrompts):
  """Raises at the sixth prompt."""

  def __next__(self):
    if self.position == 6:
      raise self.error
    return super().__next__()


@pytest.mark.parametrize("error", ERRORS, ids=name_of)
def test_a_prompt_source_that_raises_ends_a_deterministic_run_as_itself(error):
  prompts = BrokenPrompts()
  prompts.error = error
  with SamplerService(Scheduler(Engine("", None))) as service:
    loop = make_loop(sampler=service, prompts=prompts, deterministic=True, admission_staleness=1, slots=3)
    with Running(loop):
      assert caught_by_the_main_loop(loop) is error


@pytest.mark.parametrize("error", ERRORS, ids=name_of)
def test_a_sampler_that_raises_ends_a_round_of_a_deterministic_run_as_itself(error):
  class Sampler(FakeSampler):
    def submit_all(self, requests):
      raise error

  with Running(make_loop(sampler=Sampler(), deterministic=True)) as loop:
    assert caught_by_the_main_loop(loop) is error


def test_a_prompt_source_that_hangs_is_noticed_and_the_state_can_be_saved(monkeypatch):
  monkeypatch.setattr(watchdog, "PERIOD", 0.02)
  monkeypatch.setattr(rollout_loop, "IDLE_POLL", 0.02)
  released = threading.Event()

  class Prompts(FakePrompts):
    def __next__(self):
      if self.position == 4:
        released.wait(20)
      return super().__next__()

  loop = make_loop(prompts=Prompts(), watchdog_seconds=0.3)
  with Running(loop):
    assert isinstance(error := caught_by_the_main_loop(loop), RolloutSilent)
    assert "released.wait" in str(error) and "'submitted': 4" in str(error)
    state, _ = loop.state_dict()
    assert [number for number, _, _ in state["intake"]["unfinished"]] == [0, 1, 2, 3]
    released.set()


def test_a_run_that_is_stopped_while_its_prompt_source_hangs_can_be_saved(monkeypatch):
  monkeypatch.setattr(rollout_loop, "IDLE_POLL", 0.02)
  hangs, released = threading.Event(), threading.Event()

  class Prompts(FakePrompts):
    def __next__(self):
      if self.position == 4:
        hangs.set()
        released.wait(3)
      return super().__next__()

  loop = make_loop(prompts=Prompts())
  with Running(loop):
    assert hangs.wait(10)
    loop.stop(timeout=0.05)
    state, _ = loop.state_dict()
    assert not released.is_set() and state["intake"]["prompts"] == {"position": 4}
    released.set()


def test_what_a_callback_of_the_loop_raises_ends_the_run_and_what_an_environment_left_behind_does_not(caplog):
  def fault():
    raise error

  async def leave_behind():
    asyncio.get_running_loop().call_soon(fault)
    tasks.append(asyncio.get_running_loop().create_task(raising(Original("too"))()))
    return StepResult([], True, 1.0)

  tasks = []
  error = Original("in a callback")
  loop = make_loop(lambda: FakeEnvironment(faults={"step": leave_behind}), admission_staleness=0)
  with Running(loop):
    assert len(Rollouts(loop, 4, Interrupt()).take(0)) == 4 and loop.error is None
    assert any("left behind by step of environment 'fake'" in record.message for record in caplog.records)
    loop._event_loop.call_soon_threadsafe(fault)
    assert caught_by_the_main_loop(loop) is error


def test_what_an_environments_constructor_leaves_behind_does_not_end_the_run(caplog):
  def fault():
    raise Original("in a callback")

  def make():
    asyncio.get_running_loop().call_soon(fault)
    return FakeEnvironment()

  loop = make_loop(make, admission_staleness=0)
  with Running(loop):
    assert len(loop.buffer.take(4, 0, timeout=20.0)) == 4 and loop.error is None
  assert any("left behind by making environment 'fake'" in record.message for record in caplog.records)


def test_a_trainer_that_asks_after_the_fault_is_told_all_the_same():
  error = Original("long ago")
  loop = make_loop(sampler=FakeSampler(reply=lambda request: (_ for _ in ()).throw(error)))
  with Running(loop):
    while loop.error is None:
      time.sleep(0.001)
  for ask in (loop.check, lambda: Rollouts(loop, 4, Interrupt()).take(0), lambda: loop.buffer.take(4, 0)):
    with pytest.raises(Original) as caught:
      ask()
    assert caught.value is error
  assert np.isfinite(loop.stats()["max_event_loop_gap"])
