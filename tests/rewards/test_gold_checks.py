"""Scorers of patterns and JSON values, and the checks of right answers of all scorers that have one."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys

import pytest

from sao_jax.episode import GraderFailure
from sao_jax.errors import ConfigError
from sao_jax.rewards.exact_match import check_pattern, regex_match
from sao_jax.rewards.grader_pool import GraderPool
from sao_jax.rewards.json_match import check_json, json_match
from sao_jax.rewards.scorers import GOLD_CHECKS, NamedScorer, check_integer, check_text, find_scorer

RIGHT = {"text": ["four", "4"], "integer": "4", "math": "4", "boxed_math": "4", "regex": "[4]", "json": 4}
SAID = {"text": "4", "integer": " 4", "json": "4"}


def test_every_scorer_is_found_pickles_and_accepts_its_right_answer():
  assert GOLD_CHECKS.keys() == RIGHT.keys()
  for name, gold in RIGHT.items():
    scorer = pickle.loads(pickle.dumps(find_scorer(name)))
    GOLD_CHECKS[name](gold, "row 1")
    assert scorer(SAID.get(name, r"<think>5</think>\boxed{4}"), gold) == 1.0
    assert scorer("<think>4", gold) == 0.0


def test_a_pattern_matches_the_whole_answer():
  assert regex_match("2026-11-30", r"\d{4}-\d\d-\d\d") == 1.0
  assert regex_match("on 2026-11-30", r"\d{4}-\d\d-\d\d") == 0.0
  assert regex_match(r"<think>2</think>\boxed{Yes}", "(?i:yes)") == 1.0
  assert regex_match("<think>yes", "yes|") == 0.0


def test_a_pattern_that_backtracks_for_ever_is_a_failure_in_time():
  pool = GraderPool(regex_match, processes=1, timeout=1.0)
  try:
    with pytest.raises(GraderFailure, match="took longer than 1 s and was killed"):
      asyncio.run(pool.grade("env", "a" * 40 + "b", "(a+)+"))
    assert asyncio.run(pool.grade("env", "aaa", "(a+)+")) == 1.0
  finally:
    pool.close()


@pytest.mark.parametrize(
  "said, gold, reward",
  [
    ('{"a": 1, "b": [true, null]}', {"b": [True, None], "a": 1}, 1.0),
    ('{"a": 1, "b": [true, null]}', '{"b": [true, null], "a": 1.0}', 1.0),
    ('Here:\n```json\n{"a": 1}\n```\nDone.', {"a": 1}, 1.0),
    ("```\n[1]\n```\nno:\n```json\n[2]\n```", [1], 0.0),
    ("```\n[1]\n```\nno:\n```json\n[2]\n```", [2], 1.0),
    ("[1, 2]", [2, 1], 0.0),
    ("[1, 2]", [1, 2, 3], 0.0),
    ('{"a": 1}', {"a": 1, "b": None}, 0.0),
    ('{"a": 1, "b": null}', {"a": 1}, 0.0),
    ('{"a": 1, "a": 2}', {"a": 2}, 0.0),
    ("0.30000000000000004", 0.3, 1.0),
    ("0.3000001", 0.3, 0.0),
    ("1e-20", 0, 0.0),
    ("1" + "0" * 400, 10**400, 1.0),
    ("1" + "0" * 400, 1.5, 0.0),
    ("9007199254740993", 9007199254740992, 0.0),
    ("true", 1, 0.0),
    ("1", True, 0.0),
    ('"1"', "1", 0.0),
    ('"yes"', '"yes"', 1.0),
    ("NaN", 1, 0.0),
    ("1e999", 1, 0.0),
    ("[" * 100_000, [], 0.0),
    ("[" * 100 + "]" * 100, [], 0.0),
    ("9" * 5000, 9, 0.0),
    ("yes", '"yes"', 0.0),
    ("<think>1", 1, 0.0),
    ("", 1, 0.0),
  ],
)
def test_json_is_compared_by_value(said, gold, reward):
  assert json_match(said, gold) == reward


@pytest.mark.parametrize(
  "check, gold",
  [
    *[(check_text, gold) for gold in (None, True, {}, [], ["4", None], " ", ["4", ""])],
    *[(check_integer, gold) for gold in ("seven", 7.5, True, None, [7])],
    *[(check_pattern, gold) for gold in ("(", "a*", "", None, "[z-a]")],
    *[
      (check_json, gold)
      for gold in ("{", "yes", '{"a": 1, "a": 1}', "NaN", float("nan"), {1, 2}, "[" * 100 + "]" * 100)
    ],
  ],
)
def test_a_right_answer_that_nothing_can_be_compared_with_is_refused(check, gold):
  with pytest.raises(ConfigError, match=r"^row 3: "):
    check(gold, "row 3")


def test_a_worker_has_imported_what_its_scorer_needs_before_the_first_answer():
  pytest.importorskip("math_verify", reason="the extra `envs` is not installed")
  shown = {name: subprocess_modules(name) for name in ("math", "integer")}
  assert shown == {"math": [True, True], "integer": [False, False]}


def subprocess_modules(name):
  """Whether a fresh interpreter that has got the scorer, as workers get it, has imported the large packages."""
  text = (
    "import pickle, sys; pickle.load(sys.stdin.buffer); print([n in sys.modules for n in ('sympy', 'math_verify')])"
  )
  done = subprocess.run(
    [sys.executable, "-c", text], input=pickle.dumps(NamedScorer(name)), capture_output=True, check=True
  )
  return json.loads(done.stdout.decode().lower())
