"""Scorers by name."""

from __future__ import annotations

import pytest

from sao_jax.errors import ConfigError
from sao_jax.rewards.scorers import SCORERS, find_scorer, integer_answer, right_answer, score_answer, text_match


@pytest.mark.parametrize(
  "said, gold, reward",
  [(" Paris\n", "Paris", 1), ("paris", "Paris", 0), ("7", 7, 1), ("grey", ["gray", " grey"], 1), ("", [], 0)],
)
def test_text_is_equal_or_one_of_a_list(said, gold, reward):
  assert text_match(said, gold) == reward


@pytest.mark.parametrize("said, gold, reward", [("+7 ", 7, 1), ("7", " 7", 1), ("7.0", 7, 0), ("seven", "7", 0)])
def test_integers_are_compared_as_numbers(said, gold, reward):
  assert integer_answer(said, gold) == reward


@pytest.mark.parametrize("gold", ["seven", 7.5, True, None, [7]])
def test_a_right_answer_that_is_no_integer_is_no_reason_for_a_zero(gold):
  with pytest.raises(ValueError):
    score_answer(integer_answer, "7", gold)


def fragile(said, gold):
  if "crash" in said:
    raise RuntimeError
  return float(said == gold)


def test_a_text_that_breaks_a_scorer_earns_nothing_and_a_right_answer_that_does_is_raised():
  assert score_answer(fragile, "crash", "7") == 0.0 and score_answer(fragile, "7", "7") == 1.0
  with pytest.raises(RuntimeError):
    score_answer(fragile, "crash", "crash")


def test_scorers_are_found_by_name_and_by_place():
  assert find_scorer("integer") is integer_answer
  assert find_scorer("sao_jax.rewards.scorers:text_match") is text_match
  for name in ("integr", "no_such_module:f", "sao_jax.rewards.scorers:f", "sao_jax.rewards.scorers:SCORERS", ":f"):
    with pytest.raises(ConfigError, match="environment.scorer"):
      find_scorer(name, "environment.scorer")


GOLD = {"text": ["gray", "grey"], "integer": 7, "math": r"\frac12", "boxed_math": "0.5", "json": {"a": [1, None]}}


@pytest.mark.parametrize("name", sorted({*SCORERS} - {"regex"}))
def test_a_right_answer_is_said_as_its_scorer_wants_it(name):
  if "math" in name:
    pytest.importorskip("math_verify", reason="the extra `envs` is not installed")
  scorer = find_scorer(name)
  assert scorer(right_answer(name, GOLD[name]), GOLD[name]) == 1.0 and scorer("3", GOLD[name]) == 0.0


def test_a_pattern_is_no_answer_to_demonstrate():
  with pytest.raises(ConfigError, match="no answer to demonstrate"):
    right_answer("regex", "[a-z]+")
