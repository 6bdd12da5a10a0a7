"""Several sources of prompts in one order: each gets its share of every cycle, exactly, and no draw decides when.

weights 3, 1    A A B A | A B A A | ...    each cycle holds three of A and one of B
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from sao_jax.episode import Prompt


class MixedPrompts(Sequence[Prompt]):
  """The prompts of several sources: `make_prompt_iterator` draws them by their weights.

  As a sequence it deals them out in turn, one of each source, until all have been dealt: the first few of it, which
  evaluations and checks look at, are of all sources.

  >>> ["".join(MixedPrompts(["abcd", "x", "12"], (3, 1, 1))[index] for index in range(7))]
  ['ax1b2cd']
  """

  def __init__(self, sources: Sequence[Sequence[Prompt]], weights: Sequence[int]):
    """Args:
    sources: none of them empty.
    weights: at least 1 each.
    """
    self.sources, self.weights = tuple(sources), tuple(weights)
    # Rounds in which the same sources deal: up to the smallest, then up to the next one, ...
    self._rounds = sorted({0, *map(len, self.sources)})
    self._begins = [sum(min(len(source), dealt) for source in self.sources) for dealt in self._rounds]

  def __len__(self) -> int:
    return self._begins[-1]

  def __getitem__(self, index: int) -> Prompt:
    if not 0 <= index < len(self):
      raise IndexError(index)
    stage = bisect.bisect_right(self._begins, index) - 1
    first_round = self._rounds[stage]
    dealing = [source for source in self.sources if len(source) > first_round]
    later_rounds, place = divmod(int(index) - self._begins[stage], len(dealing))
    return dealing[place][first_round + later_rounds]


class Turns:
  """The order in which sources take turns: position -> (source, number of its turn), for positions without end.

  The cycle has as many turns as the weights, divided by what they have in common, add up to. Within it each source is
  never far from its share. Every cycle begins at another place of the same round, by the seed, so that processes that
  take every n-th position do not meet the same source each time.

  >>> turns = Turns((6, 2), seed=0)
  >>> turns.length, sorted(turns[position] for position in range(4))
  (4, [(0, 0), (0, 1), (0, 2), (1, 0)])
  """

  def __init__(self, weights: Sequence[int], seed: int):
    common = math.gcd(*weights)
    self._weights, self._seed = np.asarray(weights) // common, seed
    self.length = int(self._weights.sum())
    self._sources = _round(self._weights)
    # [source, place]: turns of the source before this place of two rounds, one behind the other.
    twice = np.tile(self._sources, 2)
    taken = np.cumsum(twice == np.arange(len(weights))[:, None], axis=1)
    self._before = np.concatenate([np.zeros((len(weights), 1), taken.dtype), taken], axis=1)

  def __getitem__(self, position: int) -> tuple[int, int]:
    cycle, place = divmod(int(position), self.length)
    begin = int(_word(self._seed, cycle)) % self.length
    source = int(self._sources[(begin + place) % self.length])
    turn = cycle * self._weights[source] + self._before[source, begin + place] - self._before[source, begin]
    return source, int(turn)

  def seed_of(self, source: int) -> int:
    """Returns a seed of the source's own, of 32 bits."""
    return int(_word(self._seed, source, 1))


class InTurns(Sequence[Any]):
  """Endless items: at each position the next one of the source whose turn it is."""

  def __init__(self, passes: Sequence[Any], turns: Turns):
    """Args:
    passes: endless random access for each source.
    turns: their order.
    """
    self._passes, self._turns = passes, turns

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, position: int) -> Any:
    source, turn = self._turns[position]
    return self._passes[source][turn]


def _round(weights: np.ndarray) -> np.ndarray:
  """Orders the turns of one round: each goes to the source that is furthest behind its share. int64 [turns]."""
  taken, order = np.zeros_like(weights), []
  for turn in range(1, int(weights.sum()) + 1):
    order.append(int(np.argmax(weights * turn - taken * weights.sum())))
    taken[order[-1]] += 1
  return np.asarray(order)


def _word(*numbers: int) -> np.uint32:
  """Returns 32 random bits that depend on the numbers alone."""
  return np.random.SeedSequence(numbers).generate_state(1)[0]
