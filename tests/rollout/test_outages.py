"""Outages, in virtual time: what a server's absence costs, and when it stops the run."""

from __future__ import annotations

import asyncio
import collections
import time

import numpy as np
import pytest
from toys.rollout_fakes import FakeEnvironment, FakePrompts, FakeSampler, Running, completion, make_loop, train
from toys.sampler_fakes import FakeEngine
from toys.virtual_time import VirtualTimeLoop

from sao_jax.config import SamplerConfig
from sao_jax.episode import EnvironmentFailure, GraderFailure, InfrastructureFailure
from sao_jax.rollout import outages
from sao_jax.rollout.outages import Outages
from sao_jax.rollout.outcomes import EnvironmentDown, check_identity
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService


@pytest.fixture(autouse=True)
def virtual_time(monkeypatch):
  """Event loops of rollout threads run in virtual time; gives the newest one."""
  made = []
  monkeypatch.setattr(asyncio, "new_event_loop", lambda: made.append(VirtualTimeLoop()) or made[-1])
  return made


def now() -> float:
  return asyncio.get_running_loop().time()


def in_virtual_time(coroutine):
  with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
    return runner.run(coroutine)


class Remote(FakeEnvironment):
  """Asks a server in every step, and in `reset` if `sandbox`: a second each time; it is away from 10 to `until` s."""

  def __init__(self, until: float, *, error=lambda: ConnectionRefusedError("refused"), sandbox=False, turns=3):
    super().__init__(turns=turns)
    self.until, self.error, self.sandbox = until, error, sandbox

  async def ask(self):
    if 10 <= now() < self.until:
      raise self.error()
    await asyncio.sleep(1.0)

  async def reset(self, prompt):
    if self.sandbox:
      await self.ask()
    return await super().reset(prompt)

  async def step(self, action_ids):
    await self.ask()
    return await super().step(action_ids)


def run(make, until: float, made, **config) -> collections.Counter:
  """Rolls out with 32 slots, without ever training, up to a moment; returns the counters."""
  config = {"admission_staleness": 10**5, "environment_retries": 2} | config
  loop = make_loop(make, FakeSampler(delay=lambda rollout_id: 0.1), slots=32, **config)
  with Running(loop):
    while not made or made[-1].now < until and loop.error is None:
      time.sleep(0.001)
    stats = loop.stats()
  check_identity(stats)
  if loop.error is not None:
    raise loop.error
  return collections.Counter(stats)


@pytest.mark.parametrize("sandbox", [False, True], ids=["step", "reset"])
def test_an_outage_of_a_minute_costs_no_rollout_that_may_be_tried_again(sandbox, virtual_time):
  """Before: the run ended after the first second; without that rule, it had lost 32 rollouts every 0.3 s."""
  stats = run(lambda: Remote(70.0, sandbox=sandbox), 120.0, virtual_time)
  assert stats["failed_infrastructure"] + stats["failed_environment"] == 0
  assert 32 <= stats["retries"] <= 32 + 12  # those in flight, and the probes
  assert stats["generated"] > 150  # 32 slots, 3.3 or 4.3 s each: what the other minute leaves


def test_an_outage_that_may_not_be_tried_again_costs_what_is_in_flight_and_a_few_probes(virtual_time):
  stats = run(lambda: Remote(70.0, error=lambda: RuntimeError("not an OSError")), 120.0, virtual_time)
  assert 32 <= stats["failed_environment"] <= 32 + 12 and stats["retries"] == 0
  assert stats["generated"] > 150


def test_a_grader_that_is_away_costs_what_is_in_flight_and_a_few_probes(virtual_time):
  class Graded(Remote):
    async def step(self, action_ids):
      result = await FakeEnvironment.step(self, action_ids)
      if result.done and 10 <= now() < self.until:
        raise GraderFailure("fake", "the judge is away")
      await asyncio.sleep(1.0)
      return result

  stats = run(lambda: Graded(70.0), 120.0, virtual_time)
  assert 32 <= stats["failed_infrastructure"] <= 64 + 12
  assert stats["generated"] > 150


def test_an_outage_that_lasts_stops_the_run_with_the_environments_name(virtual_time):
  with pytest.raises(EnvironmentDown, match="'fake': all .* attempts in 3.. s failed .*refused"):
    run(lambda: Remote(1e9), 1e6, virtual_time, outage_seconds=300.0)
  assert 310 < virtual_time[-1].now < 400


def test_the_window_is_a_field(virtual_time):
  with pytest.raises(EnvironmentDown):
    run(lambda: Remote(1e9), 1e6, virtual_time, outage_seconds=20.0)
  assert 30 < virtual_time[-1].now < 40


def test_long_episodes_with_few_failures_are_no_outage(virtual_time):
  """Nothing ends well for 20 minutes, while one episode in five fails at once: the others get their answers."""

  class Slow(FakeEnvironment):
    async def step(self, action_ids):
      if self.prompt.key.id % 5 == 0:
        raise EnvironmentFailure("fake", "a broken task")
      await asyncio.sleep(400.0)
      return await super().step(action_ids)

  stats = run(lambda: Slow(turns=3), 2600.0, virtual_time, environment_timeout=500.0, watchdog_seconds=1e4)
  assert stats["generated"] >= 32 and stats["failed_environment"] >= 16


def test_answers_before_a_failure_that_always_comes_do_not_keep_a_run_alive(virtual_time):
  class Late(FakeEnvironment):
    async def step(self, action_ids):
      await asyncio.sleep(1.0)
      if self.actions:
        raise EnvironmentFailure("fake", "the second step always fails")
      return await super().step(action_ids)

  with pytest.raises(EnvironmentDown, match="the second step always fails"):
    run(Late, 1e6, virtual_time)
  assert virtual_time[-1].now < 500


def test_one_environment_that_is_down_does_not_hold_up_another(virtual_time):
  class Prompts(FakePrompts):
    def __next__(self):
      self.name = ("up", "down")[self.position % 2]
      return super().__next__()

  class Either(FakeEnvironment):
    async def step(self, action_ids):
      await asyncio.sleep(1.0)
      if self.prompt.key.environment == "down":
        raise EnvironmentFailure("down", "gone")
      return await super().step(action_ids)

  loop = make_loop(Either, prompts=Prompts(), slots=8, admission_staleness=100)
  with Running(loop):
    while not virtual_time or virtual_time[-1].now < 100.0:
      time.sleep(0.001)
    stats = loop.stats()
  assert stats["generated"] > 150  # of 8 slots, 2 s each: nearly all
  assert stats["failed_environment"] < 30  # the others wait for their turn, without a slot
  check_identity(loop.stats())
  assert loop.stats()["aborted"] > 100 and not loop.stats()["in_flight"]


def test_a_pause_in_which_nobody_tries_does_not_count(virtual_time):
  """The trainer compiles for ten minutes: a failure before and one behind it are no outage."""

  async def attempts():
    found = []
    outage = Outages(300.0, stop=found.append)
    for rollout_id in range(2):
      with pytest.raises(EnvironmentFailure):
        async with outage.attempt("fake", rollout_id):
          raise EnvironmentFailure("fake", "broken")
      await asyncio.sleep(600.0)
    return found

  assert in_virtual_time(attempts()) == []


def test_retries_back_off_exponentially_with_jitter_of_their_own(monkeypatch):
  outage = Outages(300.0)
  for rollout_id in range(50):
    pauses = [outage.pause(doublings, rollout_id) for doublings in range(12)]
    nominal = [min(30.0, 0.5 * 2.0**doublings) for doublings in range(12)]
    assert all(0.5 * base <= pause <= 1.5 * base for pause, base in zip(pauses, nominal, strict=True))
    assert pauses == [Outages(300.0).pause(doublings, rollout_id) for doublings in range(12)]
  assert len({outage.pause(0, rollout_id) for rollout_id in range(50)}) == 50
  assert Outages(8.0).pause(50, 0) <= 1.5  # an eighth of the window: several probes fit into it


def test_retries_of_a_rollout_wait_in_the_loop(virtual_time):
  """Two retries of the only rollout: 0.5 and 1 s, with jitter."""
  times = []

  async def refuse():
    times.append(now())
    raise ConnectionRefusedError

  make = lambda: FakeEnvironment(faults={"reset": refuse})
  loop = make_loop(make, prompts=FakePrompts(1), environment_retries=2)
  with Running(loop):
    while not loop.stats()["failed_infrastructure"]:
      time.sleep(0.001)
  first, second = np.diff(times)
  assert 0.25 <= first <= 0.75 and 0.5 <= second <= 1.5


def test_bad_evidence_is_not_the_environments_failure(virtual_time):
  """Half an hour of bad evidence, and no failure of the environment: it is the sampler that is named."""
  reply = lambda request: completion([7, 2], logprobs=[-0.5, float("nan" if request.rollout_id % 100 else "-0.5")])
  sampler = FakeSampler(delay=lambda rollout_id: 60.0, reply=reply)
  loop = make_loop(lambda: FakeEnvironment(turns=1), sampler, outage_seconds=1.0, admission_staleness=1000)
  with Running(loop):
    while not virtual_time or virtual_time[-1].now < 1800.0:
      time.sleep(0.001)
    stats = loop.stats()
  assert loop.error is None and stats["filtered"] > 150 and stats["generated"] >= 1


def test_a_deterministic_run_outlasts_an_outage_too(virtual_time):
  """All pause together there, since rounds wait for everybody."""

  def trained(until):
    tried = []

    class Away(FakeEnvironment):
      async def reset(self, prompt):
        tried.append(prompt.key.id)
        if now() < until:
          raise ConnectionRefusedError
        return await super().reset(prompt)

    with SamplerService(Scheduler(FakeEngine(SamplerConfig(num_slots=8, context_length=64)))) as service:
      loop = make_loop(Away, service, slots=4, deterministic=True, admission_staleness=0, environment_retries=5)
      with Running(loop):
        return [t.token_ids.tolist() for t in loop.buffer.take(4, 0, timeout=30)], len(tried)

  there, attempts = trained(0.0)
  away, more = trained(5.0)
  assert away == there and attempts == 4 and 8 < more <= 24


def test_a_cancelled_rollout_leaves_the_queue_of_those_that_wait(virtual_time):
  async def scene():
    outage = Outages(300.0)
    for rollout_id in range(outages.DOWN_AFTER):
      with pytest.raises(EnvironmentFailure):
        async with outage.attempt("fake", rollout_id):
          raise EnvironmentFailure("fake", "gone")
    began = []

    async def wait(rollout_id):
      async with outage.attempt("fake", rollout_id):
        began.append((rollout_id, now()))
        if rollout_id == 21:
          raise InfrastructureFailure("fake", "still gone")

    tasks = [asyncio.create_task(wait(rollout_id)) for rollout_id in range(20, 26)]
    await asyncio.sleep(0)
    assert not outage.admits("fake") and outage.admits("another") and began == []
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return began, outage.admits("fake")

  began, admits = in_virtual_time(scene())
  assert [rollout_id for rollout_id, _ in began] == [21, 22, 23, 24, 25] and admits
  times = [when for _, when in began]
  assert times[0] < times[1] and times[2:] == [times[1]] * 3  # a probe that fails, one that answers, then all


def test_sessions_are_closed_while_their_rollouts_wait(virtual_time):
  sampler = FakeSampler(delay=lambda rollout_id: 0.1)
  loop = make_loop(lambda: Remote(1e9), sampler, slots=32, environment_retries=9, admission_staleness=10**5)
  with Running(loop):
    while not virtual_time or virtual_time[-1].now < 60.0:
      time.sleep(0.001)
    assert len(sampler.open) <= 2 and loop.stats()["in_flight"] >= 32
  assert not sampler.open


def test_recovery_is_at_once(virtual_time):
  """After the probe that is answered, all slots are busy again within its own answer."""
  begun = []

  class Watched(Remote):
    async def step(self, action_ids):
      begun.append(now())
      return await super().step(action_ids)

  run(lambda: Watched(40.0), 120.0, virtual_time)
  during = [when for when in begun if 15.0 < when < 40.0]
  back = [when for when in begun if when >= 40.0]
  assert len(during) <= 8
  assert sum(when <= back[0] + 1.2 for when in back) >= 32


def test_train_goes_on_through_an_outage(virtual_time):
  sampler = FakeSampler(delay=lambda rollout_id: 0.1)
  with Running(make_loop(lambda: Remote(70.0), sampler, environment_retries=2)) as loop:
    train(loop, sampler, 40)
    assert loop.stats()["trained"] == 160 and loop.stats()["failed_infrastructure"] <= 8  # the slots
    assert virtual_time[-1].now > 70.0
