"""The oracle: tables of mean returns, against exact values."""

from __future__ import annotations

import collections
import functools

import numpy as np
import pytest

from sao_jax.environments.corridor import Corridor
from sao_jax.study.oracle import StatedEpisode, explain, explained_variance, fit_table

RIGHT, NEAR = 0.8, 0.12  # chances of a fixed policy at any door; in a side room it goes back with chance RIGHT


@functools.cache
def exact(doors, room, repairs):
  """The fixed policy's chance of success, by dynamic programming."""
  if room == "dead" or doors == 0:
    return float(room != "dead")
  if room == "side":
    return RIGHT * exact(doors, "door", repairs)
  return RIGHT * exact(doors - 1, "door", repairs) + NEAR * (exact(doors, "side", repairs - 1) if repairs else 0.0)


def value_of(state):
  """The same for a state of the episodes, in which a word may be said already."""
  _, doors, room, repairs, _, said = state
  if said in (None, "dead"):
    return exact(doors, room, repairs) if said is None else 0.0
  if said == "side":
    return exact(doors, "side", repairs - 1)
  return exact(doors - (room == "door"), "door", repairs)


def played(settings, prompt, rng):
  """One episode of the fixed policy."""
  tokenizer = settings.tokenizer()
  episode = settings.make(tokenizer)
  pieces, masks, reward = [episode.begin(prompt)], [False], None
  while reward is None:
    sign = prompt.data["doors"][episode.walk.door]
    draw, right = rng.random(), "ABCDEF".index(sign)
    word = "abcdef"[(right + (draw > RIGHT) + (draw > RIGHT + NEAR)) % 6]
    word = "<" if episode.walk.room == "side" and draw < RIGHT else word
    action = tokenizer.encode_with_specials(f"{word}<|end|>")
    result = episode.respond(action)
    reward = result.reward
    pieces += [action, result.observation]
    masks += [True, False]
  mask = np.concatenate([np.full(len(piece), masked) for piece, masked in zip(pieces, masks)])
  states = settings.states(np.concatenate(pieces), mask)
  return StatedEpisode(states, np.full(len(states), reward), np.full(len(states), 0.5))


def test_the_table_of_a_fixed_policy_has_the_values_of_dynamic_programming():
  settings, rng = Corridor(horizon=3, levels=("easy",), repairs=1, pauses=0.0), np.random.default_rng(0)
  prompts = settings.prompts(settings.tokenizer(), "train", 0)
  episodes = [played(settings, prompts[index], rng) for index in range(1500)]
  table = fit_table(episodes)
  visits = collections.Counter(state for each in episodes for state in each.states)
  for state, value in table.items():
    _, doors, room, repairs, _, said = state
    expected = exact(doors, room, repairs) if said is None else 0.0
    if said in (None, "dead"):  # four standard errors, and the prior
      error = (expected * (1 - expected) / visits[state]) ** 0.5
      assert value == pytest.approx(expected, abs=4 * error + 1 / (visits[state] + 1))
  assert {state[1:4] for state in table} >= {(3, "door", 1), (3, "side", 0), (2, "door", 0), (1, "dead", 1)}

  # The same episodes with the exact values as the critic's: the table explains as much, and the prompt nothing.
  explained = explain([each._replace(values=np.array([value_of(state) for state in each.states])) for each in episodes])
  assert explained.oracle == pytest.approx(explained.critic, abs=0.01) and explained.oracle > 0.3
  assert abs(explained.prompt) < 0.01 and explained.states == len(table)


def test_each_half_is_explained_by_the_table_of_the_other():
  # Two episodes alone in their states: each is predicted by the mean of the other half, and explains less than nothing.
  first, second = (
    StatedEpisode([name] * 2, np.full(2, value), np.full(2, value)) for name, value in (("a", 0), ("b", 1))
  )
  explained = explain([first, second])
  assert explained.oracle == pytest.approx(-3.0) and explained.critic == 1.0
  assert fit_table([first, second]) == {"a": pytest.approx(0.5 / 3), "b": pytest.approx(2.5 / 3)}
  assert fit_table([first, second])["unknown"] == 0.5
  assert np.isnan(explained_variance(np.zeros(3), np.ones(3)))
