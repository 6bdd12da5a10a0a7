"""A filter of prompts by difficulty: those that are always solved, or never, teach little, and are drawn less often.

A prompt's pass rate is kept under its name (environment and number, whatever the epoch) over the whole run. Of n
trials, s of them passed, both decayed by `decay` at each further trial,

    p = (s + 1) / (n + 2)        chance = max(floor, 4 p (1 - p))

so a prompt that nobody has tried is always drawn, as is one that half of the trials pass. p is Laplace's rule, without
which a single rollout would make it 0 or 1; 4 p (1 - p) is the variance of a trial, relative to the largest.

Trials are those that were trained on, counted when their train step has ended. The chance is tossed by a hash of seed
and key. So what is drawn depends on seed and trials alone, and goes on exactly from a checkpoint, which holds the
trials. Each process counts its own; if a run goes on with another number of processes, all of them know what any knew.

The dynamic sampling of DAPO (arXiv 2503.14476) filters finished groups instead, after they have been paid for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sao_jax.episode import Prompt, PromptKey, Trajectory
from sao_jax.rollout.prompt_stream import PromptStream

STATE = "difficulty"  # its name beside the state of the prompts
Trials = tuple[float, float]  # how many, and how many of them passed, decayed


class DifficultyFilter:
  """Prompts of a stream, without those that the toss excludes; used like the stream itself, by one thread at a time.

  >>> filtered = DifficultyFilter(iter([]), floor=0.1, decay=0.5, passes=1.0, seed=0)
  >>> filtered.chance(PromptKey("calculator", 7, 0))
  1.0
  """

  def __init__(
    self,
    prompts: PromptStream,
    *,
    floor: float,
    decay: float,
    passes: float,
    seed: int,
    on_excluded: Callable[[], None] = lambda: None,
  ):
    """Args:
    prompts: what is filtered; its state is a dictionary.
    floor: the least chance.
    decay: weight of a prompt's earlier trials, at each further one.
    passes: the return from which on a trial has passed.
    seed: of the tosses.
    on_excluded: called for every prompt that is left out.
    """
    self._prompts, self._floor, self._decay, self._passes, self._seed = prompts, floor, decay, passes, seed
    self._on_excluded = on_excluded
    self._trials: dict[tuple[str, int], Trials] = {}

  def __iter__(self) -> DifficultyFilter:
    return self

  def __next__(self) -> Prompt:
    while not self._drawn(prompt := next(self._prompts)):
      self._on_excluded()
    return prompt

  def chance(self, key: PromptKey) -> float:
    """Returns the chance that a prompt is drawn when its turn comes."""
    trials, passed = self._trials.get((key.environment, int(key.id)), (0.0, 0.0))
    rate = (passed + 1.0) / (trials + 2.0)
    return max(self._floor, 4.0 * rate * (1.0 - rate))

  def note(self, trajectories: Iterable[Trajectory]) -> None:
    """Counts the trials of a train step, in their order."""
    for trajectory in trajectories:
      name = (trajectory.key.environment, int(trajectory.key.id))
      trials, passed = self._trials.get(name, (0.0, 0.0))
      now = float(trajectory.reward >= self._passes)
      self._trials[name] = (self._decay * trials + 1.0, self._decay * passed + now)

  def get_state(self) -> dict[str, Any]:
    """Returns the stream's state, with the trials beside it; JSON. Streams without a filter pass them over."""
    trials: dict[str, list[list[float]]] = {}
    for (environment, number), counts in self._trials.items():
      trials.setdefault(environment, []).append([number, *counts])
    return {**self._prompts.get_state(), STATE: trials}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to a state; one without trials, such as those of runs without a filter, begins with none.

    Of several processes' states, {"shares": [...]}, the one with the most trials of a prompt knows it best.
    """
    self._prompts.set_state(state)
    self._trials = _most(share.get(STATE, {}) for share in state.get("shares", [state]))

  def _drawn(self, prompt: Prompt) -> bool:
    chance = self.chance(prompt.key)
    return chance >= 1.0 or toss(self._seed, prompt.key) < chance


def toss(seed: int, key: PromptKey) -> float:
  """Returns a number in [0, 1), uniform over keys, that depends on seed and key alone."""
  text = f"{seed}/{int(key.epoch)}/{int(key.id)}/{key.environment}"
  return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:6], "big") / 2**48


def _most(states: Iterable[dict[str, Sequence[Sequence[float]]]]) -> dict[tuple[str, int], Trials]:
  known: dict[tuple[str, int], Trials] = {}
  for state in states:
    for environment, rows in state.items():
      for number, trials, passed in rows:
        name = (environment, int(number))
        known[name] = max(known.get(name, (0.0, 0.0)), (trials, passed))
  return known
