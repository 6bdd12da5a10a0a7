"""Calls that hold the event loop: the culprit fails, by name, and nobody else is charged for the time."""

from __future__ import annotations

import asyncio
import time

import pytest
from toys.rollout_fakes import FakeEnvironment, FakePrompts, FakeSampler, Running, make_loop, prompt

from sao_jax.episode import Trajectory
from sao_jax.rollout import loop_clock
from sao_jax.rollout.entries import Rollout
from sao_jax.rollout.outcomes import EnvironmentTimeout, EventLoopBlocked
from sao_jax.rollout.run_episode import EpisodeLimits
from sao_jax.rollout.runner import EpisodeRunner

TIMEOUT, BLOCK, ANSWER = 0.2, 0.4, 0.03  # seconds: for a call, of the culprit, of everybody else at least
LIMITS = EpisodeLimits(9, 1000, 50, 1000, 10**6, 100)
BLOCKED = "failed_infrastructure/EventLoopBlocked"


async def answer_later(number: int = 0):
  """An answer in several pieces, so that it takes several rounds of the loop; the culprit's, of number 1, is short."""
  for _ in range(1 + number % 4):
    await asyncio.sleep(ANSWER)


def environments(method: str, block):
  """Makes environments whose every call takes a while; the second one calls `block` in `method`."""
  made = []

  class Episode(FakeEnvironment):
    async def call(self, name, then):
      await answer_later(made.index(self))
      if self is made[1] and name == method:
        await block()
      return await then()

    async def reset(self, prompt):
      parent = super()
      return await self.call("reset", lambda: parent.reset(prompt))

    async def step(self, action_ids):
      parent = super()
      return await self.call("step", lambda: parent.step(action_ids))

    async def on_truncated(self, status):
      parent = super()
      return await self.call("on_truncated", lambda: parent.on_truncated(status))

    async def close(self):
      parent = super()
      return await self.call("close", lambda: parent.close())

  def make():
    made.append(Episode(turns=99 if method == "on_truncated" else 2))
    if len(made) == 2 and method == "make":
      time.sleep(BLOCK)
    return made[-1]

  return make


async def block_itself():
  time.sleep(BLOCK)


async def block_in_a_task():
  await asyncio.gather(block_itself(), asyncio.sleep(0))


async def block_in_pieces():
  for _ in range(4):
    time.sleep(BLOCK / 4)
    await asyncio.sleep(0)


@pytest.mark.parametrize(
  "method, block",
  [
    ("step", block_itself),
    ("step", block_in_a_task),
    ("step", block_in_pieces),
    ("reset", block_itself),
    ("on_truncated", block_itself),
    ("make", None),
  ],
)
def test_one_blocking_call_among_32_slots_costs_one_rollout(method, block):
  loop = make_loop(
    environments(method, block),
    prompts=FakePrompts(32),
    slots=32,
    batch_size=32,
    admission_staleness=0,
    environment_timeout=TIMEOUT,
    environment_retries=2,
  )
  with Running(loop):
    while loop.stats()["in_flight"] or not loop.stats()["submitted"]:
      time.sleep(0.001)
    stats = loop.stats()
  assert {name: count for name, count in stats.items() if "/" in name} == {BLOCKED: 1}
  assert (stats["submitted"], stats["buffered"], stats["retries"]) == (32, 31, 0)


def run_episodes(make, count: int = 8) -> list[Trajectory | BaseException]:
  """Episodes as an evaluation runs them."""

  async def run_all():
    runner = EpisodeRunner(make, FakeSampler(), LIMITS, timeout=TIMEOUT)
    rollouts = (Rollout(number, prompt(number)) for number in range(count))
    results = await asyncio.gather(*map(runner.run, rollouts), return_exceptions=True)
    await asyncio.gather(*runner.closing)
    return results

  return asyncio.run(run_all())


def test_an_evaluation_names_the_call_and_the_remedy_and_counts_everybody_else():
  results = run_episodes(environments("step", block_itself))
  (failure,) = (result for result in results if not isinstance(result, Trajectory))
  assert isinstance(failure, EventLoopBlocked) and not failure.retryable
  for part in ("'fake': step blocked the event loop for 0.4 s", "a call may take 0.2 s", "InThreads or InProcesses"):
    assert part in str(failure)


def test_an_environment_that_took_too_long_to_be_made_is_closed():
  class Slow(FakeEnvironment):
    def __init__(self):
      super().__init__()
      made.append(self)
      time.sleep(TIMEOUT + 0.1)

  made = []
  (failure,) = run_episodes(Slow, 1)
  assert isinstance(failure, EventLoopBlocked) and [one.closed for one in made] == [True]


def test_time_that_nobody_answers_for_is_charged_to_nobody():
  async def block_behind_everybodys_back():
    asyncio.get_running_loop().call_soon(time.sleep, BLOCK)  # as a paused process, or a collection of garbage
    await answer_later()

  assert all(
    isinstance(result, Trajectory) for result in run_episodes(environments("step", block_behind_everybodys_back))
  )


def test_a_call_that_hangs_after_a_standstill_still_times_out():
  async def hang():
    asyncio.get_running_loop().call_soon(time.sleep, BLOCK)
    await asyncio.sleep(3600)

  began = time.monotonic()
  results = run_episodes(environments("step", hang))
  (failure,) = (result for result in results if not isinstance(result, Trajectory))
  assert type(failure) is EnvironmentTimeout and time.monotonic() - began > BLOCK + TIMEOUT


def test_many_short_stretches_that_hold_the_loop_together_are_warned_about_once_by_name(monkeypatch, caplog):
  monkeypatch.setattr(loop_clock, "LONG", 0.1)

  class Computing(FakeEnvironment):
    async def step(self, action_ids):
      time.sleep(0.03)  # eight of them in one round of the loop
      return await super().step(action_ids)

  assert all(isinstance(result, Trajectory) for result in run_episodes(Computing))
  (record,) = (record for record in caplog.records if "stood still" in record.message)
  assert "step of environment 'fake' held it for 0." in record.message and "stretches" in record.message
  assert "InThreads" in record.message
