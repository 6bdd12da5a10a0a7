"""Synchronous environments in threads and in processes: they hold up nobody, and what hangs costs one rollout."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import os
import re
import sys
import threading
import time

import pytest
from toys import synchronous_toy
from toys.paths import REPOSITORY
from toys.rollout_fakes import FakeEnvironment, FakeSampler
from toys.synchronous_toy import Misbehaving, Threaded, prompt

from sao_jax.configuration import config_tree
from sao_jax.environments import Calculator, Chaos, InProcesses, InThreads, StepResult
from sao_jax.environments.base import DemonstratingSpec
from sao_jax.environments.synchronous import ThreadedEpisode
from sao_jax.episode import BadPrompt, EnvironmentFailure, GraderFailure, InfrastructureFailure, Trajectory
from sao_jax.errors import ConfigError
from sao_jax.rewards.grader_pool import GraderPool
from sao_jax.rollout.ledger import Rollout
from sao_jax.rollout.outcomes import EnvironmentTimeout, UnexpectedFailure
from sao_jax.rollout.run_episode import EpisodeLimits
from sao_jax.rollout.runner import EpisodeRunner

LIMITS = EpisodeLimits(9, 1000, 50, 1000, 10**6, 100)


def play(make, *kinds: str, timeout: float = 20.0, beside=None, limits=LIMITS) -> list[Trajectory | BaseException]:
  """One episode of each kind, side by side, and a coroutine beside them."""

  async def run_all():
    runner = EpisodeRunner(make, FakeSampler(), limits, timeout=timeout)
    episodes = [runner.run(Rollout(number, prompt(kind, number))) for number, kind in enumerate(kinds)]
    others = [beside()] if beside is not None else []
    results = await asyncio.gather(*episodes, *others, return_exceptions=True)
    await asyncio.gather(*runner.closing)
    return results[: len(kinds)]

  return asyncio.run(run_all())


@pytest.fixture
def toy():
  settings = Threaded(threading.Event(), [])
  yield settings
  settings.event.set()


def wait_until(condition, seconds: float = 10.0) -> None:
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "waited in vain"
    time.sleep(0.001)


def test_the_event_loop_goes_on_and_all_calls_of_an_episode_are_made_in_one_thread(toy):
  async def release():
    while sum(len(episode.calls) == 3 for episode in toy.episodes) < 3:  # all of them block in their step
      await asyncio.sleep(0.001)
    toy.event.set()

  spec = InThreads(toy)
  results = play(lambda: spec.make(None), *"abc", beside=release)
  assert [result.reward for result in results] == [1.0] * 3
  for episode in toy.episodes:
    assert [name for name, _ in episode.calls] == ["make", "reset", "step", "close"]
    assert len({thread for _, thread in episode.calls}) == 1
  assert threading.get_ident() not in {thread for episode in toy.episodes for _, thread in episode.calls}


def test_a_thread_that_hangs_gives_its_place_to_the_next_episode_and_is_counted(toy, caplog):
  spec = InThreads(toy, workers=1, max_abandoned=1)
  results = play(lambda: spec.make(None), "a", "b", timeout=0.1)
  assert [type(result) for result in results] == [EnvironmentTimeout] * 2
  assert spec.places.abandoned == 2 and "such threads: 2" in caplog.text
  (refused,) = play(lambda: spec.make(None), "c")
  assert isinstance(refused, InfrastructureFailure) and "InProcesses" in str(refused)

  # Both come back at last: they close themselves, and their number sinks.
  toy.event.set()
  wait_until(lambda: spec.places.abandoned == 0)
  assert [episode.calls[-1][0] for episode in toy.episodes] == ["close", "close"]
  assert play(lambda: spec.make(None), "d")[0].reward == 1.0


def test_waiting_for_a_place_uses_up_nobodys_time(toy):
  class Slow(synchronous_toy.ThreadedToy):
    def step(self, action_ids):
      time.sleep(0.25)
      return StepResult([], True, 1.0)

  spec = InThreads(dataclasses.replace(toy, name="slow"), workers=1)
  object.__setattr__(spec, "inner", type("Spec", (), {"name": "slow", "make": lambda self, _: Slow(toy.event)})())
  results = play(lambda: spec.make(None), *"abcd", timeout=0.6)  # the last one waits for .75 s
  assert [getattr(result, "reward", result) for result in results] == [1.0] * 4


def test_waiting_for_a_grader_uses_up_nobodys_time():
  pool = GraderPool(synchronous_toy.nap, processes=1)

  class Graded(FakeEnvironment):
    async def step(self, action_ids):
      return StepResult([], True, await pool.grade("fake", 0.3))

  results = play(Graded, *"abcd", timeout=0.8)  # the first one waits for the worker's start, too
  pool.close()
  assert [getattr(result, "reward", result) for result in results] == [1.0] * 4


def test_a_call_that_gave_a_grader_up_is_charged_for_its_time_again():
  pool = GraderPool(synchronous_toy.nap, processes=1)

  class Impatient(FakeEnvironment):
    async def step(self, action_ids):
      busy = asyncio.create_task(pool.grade("fake", 3600.0))
      await asyncio.sleep(0.05)
      with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(pool.grade("fake", 0.0), 0.05)
      await asyncio.sleep(5)
      await busy

  (failure,) = play(Impatient, "", timeout=0.4)
  pool.close()
  assert isinstance(failure, EnvironmentTimeout)


def test_an_episode_whose_close_was_given_up_is_not_closed_again(toy):
  class Slow(synchronous_toy.ThreadedToy):
    def close(self):
      super().close()
      self.event.wait(20)

  async def run():
    toy_episode, places = Slow(toy.event), InThreads(toy).places
    episode = ThreadedEpisode("fake", places, lambda: toy_episode)
    await episode.reset(prompt(""))
    with pytest.raises(asyncio.TimeoutError):
      await asyncio.wait_for(episode.close(), 0.05)
    toy.event.set()
    while places.abandoned:
      await asyncio.sleep(0.001)
    return toy_episode.calls

  assert [name for name, _ in asyncio.run(run())] == ["make", "reset", "close"]


def test_processes_play_one_episode_after_the_other_and_what_fails_keeps_its_type():
  spec = InProcesses(Misbehaving(), workers=1)
  assert spec.prompts(spec.tokenizer(), "train", 0)[0].data == {"kind": ""}
  one, other = play(lambda: spec.make(None), "", "")
  assert one.reward == other.reward != os.getpid()  # the same worker, and not this process
  assert one.info["length"] == one.num_sampled

  expected = {
    "raise": (UnexpectedFailure, "step raised RuntimeError: ValueError: a bug"),
    "infrastructure": (InfrastructureFailure, "server gone"),
    "grader": (GraderFailure, "crashed"),
    "garbage": (EnvironmentFailure, "the prompt is not an array of token ids|the prompt must be integers"),
    "no picture": (BadPrompt, "prompts: no picture\n.*drop it"),
    "leave": (UnexpectedFailure, "SystemExit: 3"),
    "hang": (EnvironmentTimeout, "step took longer than 0.5 s"),
  }
  for kind, (failure, text) in expected.items():
    (result,) = play(lambda: spec.make(None), kind, timeout=0.5 if kind == "hang" else 20.0)
    assert type(result) is failure and re.search(text, str(result))
  assert play(lambda: spec.make(None), "talk", limits=dataclasses.replace(LIMITS, max_turns=1))[0].reward == 0.5

  # What hung was killed, and is replaced.
  wait_until(lambda: not os.path.exists(f"/proc/{int(one.reward)}"))
  after, died = play(lambda: spec.make(None), "", "die")
  assert after.reward != one.reward and spec._places.abandoned == 0
  assert type(died) is InfrastructureFailure and "died, exit status 4, in step" in str(died)


@pytest.fixture
def example(tmp_path, monkeypatch):
  """The module that the README shows."""
  readme = (REPOSITORY / "sao_jax" / "environments" / "WRITE.md").read_text(encoding="utf-8")
  section = readme.partition("\n## Synchronous environments\n")[2]
  (tmp_path / "countdown.py").write_text(re.search(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[1])
  monkeypatch.syspath_prepend(tmp_path)
  yield importlib.import_module("countdown")
  del sys.modules["countdown"]


def test_the_example_of_the_readme_plays_in_threads_and_behind_other_wrappers(example):
  spec = Chaos(InThreads(example.Countdown()))
  tokenizer = spec.tokenizer()
  source = spec.prompts(tokenizer, "train", 0)
  assert not {p.key.id for p in source} & {p.key.id for p in spec.prompts(tokenizer, "heldout", 0)}

  async def count_down(numbers):
    environment = spec.make(tokenizer)
    shown = tokenizer.decode(await environment.reset(source[0]))
    results = [await environment.step(tokenizer.encode_with_specials(f"{n}<|end|>")) for n in numbers]
    assert environment.stop_ids == (tokenizer.end_id,)
    await environment.close()
    return shown, [(result.done, result.reward) for result in results]

  shown, results = asyncio.run(count_down([2, 1, 0]))
  assert shown == "<|bos|><|user|>3<|end|><|assistant|>"
  assert results == [(False, 0.0), (False, 0.0), (True, 1.0)]
  assert asyncio.run(count_down([7]))[1] == [(True, 0.0)]


def test_settings_that_cannot_work_are_refused():
  for change in ({"workers": -1}, {"max_abandoned": -1}):
    with pytest.raises(ConfigError):
      InThreads(Calculator(), **change)
  with pytest.raises(ConfigError):
    InProcesses(Calculator(), workers=-1)

  @dataclasses.dataclass(frozen=True)
  class Hidden(Misbehaving):
    pass

  with pytest.raises(ConfigError) as caught:
    InProcesses(Hidden()).prompts(None, "train", 0)
  assert caught.value.field == "environment.inner" and "top level of a module" in str(caught.value)


@pytest.mark.parametrize("wrap", [InThreads, InProcesses])
def test_they_are_the_settings_of_what_they_wrap(wrap):
  spec = config_tree.replace(wrap(Calculator()), {"workers": 3, "inner.max_operand": 7})
  assert (spec.workers, spec.inner.max_operand, spec.name) == (3, 7, "calculator")
  config_tree.check_types(spec)
  assert isinstance(spec, DemonstratingSpec)
