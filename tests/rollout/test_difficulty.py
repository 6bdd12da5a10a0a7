"""The filter by difficulty: chances as the formula says, counted, exactly reproducible, saved and divided."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math

import numpy as np
import pytest
from toys.rollout_fakes import FakePrompts, FakeSampler, Running, make_loop, make_trajectory, train

from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.episode import BadPrompt, Prompt, PromptKey
from sao_jax.rollout.difficulty import DifficultyFilter, toss

SETTINGS = {"floor": 0.2, "decay": 0.95, "passes": 1.0, "seed": 3}


class Passes(FakePrompts):
  """Prompts 0 ... 7, again and again, in epochs."""

  def __next__(self):
    drawn = super().__next__()
    return dataclasses.replace(drawn, key=PromptKey("fake", drawn.key.id % 8, drawn.key.id // 8))


class Rounds(FakeSampler):
  """Answers a whole round at once, as deterministic runs want it."""

  def submit_all(self, requests):
    futures = [concurrent.futures.Future() for _ in requests]
    for future, request in zip(futures, requests):
      future.set_result(self.answer(request))
    return futures


def trial(number, reward, environment="fake"):
  return dataclasses.replace(make_trajectory(reward=reward), key=PromptKey(environment, number, 5))


def test_a_chance_is_that_of_the_formula_whatever_the_epoch():
  filtered = DifficultyFilter(FakePrompts(), **SETTINGS)
  history = [1.0, 0.99, 1.0, 1.0, 0.0, -3.0, 2.0]
  for last in range(len(history) + 1):
    trials = sum(0.95**age for age in range(last))
    passed = sum(0.95**age * (reward >= 1.0) for age, reward in enumerate(reversed(history[:last])))
    rate = (passed + 1) / (trials + 2)
    assert filtered.chance(PromptKey("fake", 1, last)) == pytest.approx(max(0.2, 4 * rate * (1 - rate)))
    filtered.note([trial(1, reward) for reward in history[last : last + 1]])
  assert filtered.chance(PromptKey("fake", 2, 0)) == filtered.chance(PromptKey("other", 1, 0)) == 1.0

  never_forgets = DifficultyFilter(FakePrompts(), floor=0.05, decay=1.0, passes=1.0, seed=0)
  never_forgets.note(trial(1, 1.0) for _ in range(98))
  assert never_forgets.chance(PromptKey("fake", 1, 0)) == 0.05
  never_forgets.note(trial(1, 0.0) for _ in range(98))
  assert never_forgets.chance(PromptKey("fake", 1, 0)) == 1.0


def test_prompts_are_drawn_as_often_as_their_chances_say_and_the_others_are_counted():
  excluded, passes = [], 4000
  filtered = DifficultyFilter(Passes(8 * passes), **SETTINGS, on_excluded=lambda: excluded.append(1))
  for number in range(1, 8):  # prompt 0 was never tried
    filtered.note(trial(number, float(step % 6 < number - 1)) for step in range(40))
  chances = [filtered.chance(PromptKey("fake", number, 0)) for number in range(8)]
  assert chances[0] == 1.0 and min(chances) == 0.2 and len(set(chances)) > 3

  drawn = np.bincount([prompt.key.id for prompt in filtered], minlength=8)
  assert drawn.sum() + len(excluded) == 8 * passes and drawn[0] == passes
  for count, chance in zip(drawn, chances):
    assert abs(count - passes * chance) <= 4 * math.sqrt(passes * chance * (1 - chance))


def test_tosses_are_uniform_and_depend_on_seed_epoch_and_environment():
  names = [(seed, PromptKey("a", number, epoch)) for seed in (0, 1) for number in range(50) for epoch in range(20)]
  tosses = np.array([toss(*name) for name in names])
  assert len(set(tosses)) == 2000
  counts, _ = np.histogram(tosses, bins=10, range=(0, 1))
  assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi-squared of 9 degrees, 99.9 %
  assert toss(0, PromptKey("a", 1, 0)) != toss(0, PromptKey("b", 1, 0))


def items(count=12):
  return [Prompt(PromptKey("env", number, 0), {"question": str(number)}) for number in range(count)]


def stream(shard=(0, 1), **changes):
  return DifficultyFilter(make_prompt_iterator(items(), seed=1, shard=shard), **SETTINGS | changes)


def draw_and_try(filtered, count):
  """The keys of the next prompts; each is tried at once, and even numbers pass."""
  keys = []
  for _ in range(count):
    keys.append(next(filtered).key)
    filtered.note([trial(keys[-1].id, float(keys[-1].id % 2 == 0), "env")])
  return keys


def test_the_order_goes_on_exactly_from_a_saved_state():
  whole = stream()
  keys = draw_and_try(whole, 48)
  assert keys[-1].epoch > 4  # 3 if nothing had been left out
  parts = stream()
  assert draw_and_try(parts, 28) == keys[:28]
  resumed = stream()
  resumed.set_state(json.loads(json.dumps(parts.get_state())))
  assert draw_and_try(resumed, 20) == keys[28:] and resumed.get_state() == whole.get_state()
  assert draw_and_try(stream(seed=4), 48) != keys


def test_states_with_and_without_trials_are_read_with_and_without_a_filter():
  plain = make_prompt_iterator(items(), seed=1)
  keys = [next(plain).key for _ in range(20)]
  filtered = stream()
  filtered.set_state(plain.get_state())  # of a run that had no filter
  assert filtered.chance(keys[0]) == 1.0 and next(filtered).key == next(plain).key
  filtered.note([trial(3, 1.0, "env")] * 9)
  unfiltered = make_prompt_iterator(items(), seed=1)
  unfiltered.set_state(json.loads(json.dumps(filtered.get_state())))
  assert next(unfiltered).key == next(plain).key


def test_processes_that_become_more_or_fewer_know_what_any_of_them_knew():
  shares = [stream((index, 2)) for index in range(2)]
  for number, share in enumerate(shares):
    share.note([trial(3, 0.0, "env")] * (2 + number) + [trial(4 + number, 1.0, "env")])
  states = {"shares": json.loads(json.dumps([share.get_state() for share in shares]))}
  for index in range(3):
    resumed = stream((index, 3))
    resumed.set_state(states)
    for number, knows in ((3, 1), (4, 0), (5, 1), (6, 0)):
      assert resumed.chance(PromptKey("env", number, 0)) == shares[knows].chance(PromptKey("env", number, 0))


def test_a_bad_prompt_passes_through():
  class Bad(FakePrompts):
    def __next__(self):
      raise BadPrompt("prompts", "damaged.", "Skip it.")

  with pytest.raises(BadPrompt):
    next(DifficultyFilter(Bad(), **SETTINGS))


def run(steps, deterministic, state=None, version=0):
  """A loop with a filter: (keys that were trained on, state, statistics)."""
  keys, filtered = [], DifficultyFilter(Passes(), **SETTINGS)
  sampler = Rounds(version=version)
  loop = make_loop(
    sampler=sampler, prompts=filtered, admission_staleness=0, deterministic=deterministic, on_trained=filtered.note
  )
  filtered._on_excluded = lambda: loop.buffer.statistics.add("excluded_prompts")
  if state is not None:
    loop.load_state_dict(*state)
  with Running(loop):
    for _ in range(steps):
      version = train(
        loop, sampler, 1, version=version, inspect=lambda batch, version: keys.extend(each.key for each in batch)
      )
    loop.wait_until_idle(timeout=30.0)
    return keys, loop.state_dict(), loop.stats()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_counts_what_is_trained_on_and_goes_on_as_if_it_had_not_stopped(deterministic):
  keys, _, stats = run(20, deterministic)
  assert len(keys) == 80 and stats["excluded_prompts"] > 20
  assert keys[:8] == [PromptKey("fake", number, 0) for number in range(8)]  # unseen ones are drawn

  first, state, before = run(12, deterministic)
  rest, _, after = run(8, deterministic, state, version=12)
  assert (
    first + rest == keys and 0 < before["excluded_prompts"] < after["excluded_prompts"] == stats["excluded_prompts"]
  )
