"""An oracle of returns: the mean return of each state of a task, which shows what a critic could explain at most.

Who knows the state of a task, and has many episodes of a policy, needs no network: the mean return of the episodes
that came through a state is its value. The explained variance of these means is the measure of a critic's.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class StatedEpisode(NamedTuple):
  """The n sampled tokens of an episode.

  Attributes:
    states: the task's state before each token.
    returns: float [n], the return from there.
    values: float [n], what a critic says of it.
  """

  states: Sequence[Hashable]
  returns: Float[np.ndarray, "n"]
  values: Float[np.ndarray, "n"]


class Explained(NamedTuple):
  """Explained variances over the same tokens, NaN where all returns are equal.

  Attributes:
    oracle: of the table of all states.
    prompt: of a table of first states: what the best baseline explains that knows the prompt alone, as a group's mean.
    critic: of the critic's values.
    states: states that the table knows.
  """

  oracle: float
  prompt: float
  critic: float
  states: int


def explain(episodes: Sequence[StatedEpisode]) -> Explained:
  """Compares a critic with tables of states, each fitted on the other half of the episodes."""
  halves = episodes[::2], episodes[1::2]
  of_prompts = [[each._replace(states=[each.states[0]] * len(each.states)) for each in half] for half in halves]
  returns = np.concatenate([each.returns for half in halves for each in half])
  return Explained(
    oracle=explained_variance(_predicted(halves), returns),
    prompt=explained_variance(_predicted(of_prompts), returns),
    critic=explained_variance(np.concatenate([each.values for half in halves for each in half]), returns),
    states=len({state for each in episodes for state in each.states}),
  )


def fit_table(episodes: Sequence[StatedEpisode], prior: float = 1.0) -> collections.defaultdict[Hashable, float]:
  """Returns the mean return of each state, and that of all tokens for a state that is not known.

  Args:
    episodes: at least one.
    prior: tokens of mean return that each state has besides its own, so that rare ones do not say too much.
  """
  sums, counts = collections.Counter(), collections.Counter()
  for episode in episodes:
    for state, value in zip(episode.states, episode.returns, strict=True):
      sums[state] += float(value)
      counts[state] += 1
  mean = sum(sums.values()) / sum(counts.values())
  table = {state: (sums[state] + prior * mean) / (counts[state] + prior) for state in counts}
  return collections.defaultdict(lambda: mean, table)


def explained_variance(values: Float[np.ndarray, "n"], returns: Float[np.ndarray, "n"]) -> float:
  """Returns 1 - Var(R - V) / Var(R), NaN without variance."""
  spread = np.var(returns, dtype=np.float64)
  return float(1.0 - np.var(returns - values, dtype=np.float64) / spread) if spread > 0.0 else float("nan")


def _predicted(halves: Sequence[Sequence[StatedEpisode]]) -> Float[np.ndarray, "n"]:
  """Predicts the returns of each half by the table of the other."""
  tables = [fit_table(half) for half in halves]
  return np.array(
    [table[state] for half, table in zip(halves, reversed(tables)) for each in half for state in each.states]
  )
