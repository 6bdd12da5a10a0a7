"""Mathematical answers: a table of pairs, which box counts, right answers refused when the data load, and attacks."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from toys.math_pairs import TABLE

from sao_jax.errors import ConfigError
from sao_jax.rewards.grader_pool import GraderPool
from sao_jax.rewards.math_answer import boxed_math_match, check_gold, math_match


@pytest.fixture(scope="module")
def pool():
  pool = GraderPool(boxed_math_match, processes=1, timeout=60.0)  # the first call imports sympy
  yield pool
  pool.close()


def test_the_table_holds_and_every_right_answer_in_it_can_be_read():
  wrong = []
  for gold, said, right in TABLE:
    check_gold(gold)
    if boxed_math_match(rf"The answer is \boxed{{{said}}}.", gold) != float(right):
      wrong.append((gold, said, right))
  assert not wrong
  assert len(TABLE) >= 160 and len({(gold, said) for gold, said, _ in TABLE}) == len(TABLE)


@pytest.mark.parametrize(
  "said, reward",
  [
    (r"\boxed{4}", 1.0),
    ("4", 0.0),
    ("The answer is 4.", 0.0),
    (r"\boxed{}", 0.0),
    (r"\boxed{4", 0.0),
    (r"\boxed{3}, no: \boxed{4}", 1.0),
    (r"\boxed{4}, no: \boxed{3}", 0.0),
    (r"<think>\boxed{4}</think>", 0.0),
    (r"<think>\boxed{4}</think>It is \boxed{3}.", 0.0),
    (r"<think>\boxed{3}</think>It is \boxed{4}.", 1.0),
    (r"\boxed{3}</think>It is \boxed{4}.", 1.0),
    (r"<think>perhaps \boxed{4}", 0.0),
    (r"\boxed{\frac{8}{\sqrt{\frac{16}{4}}}}", 1.0),
    (r"\boxed{\boxed{4}}", 1.0),
    (r"\fbox{4}", 1.0),
    ("".join(rf"\boxed{{{number}}} " for number in range(1000)), 0.0),
    (r"\boxed{" + ", ".join(map(str, range(100))) + "}", 0.0),
    (r"\boxed{4 \text{ or } 5}", 0.0),
    (r"\boxed{\boxed{4}, \boxed{5}}", 0.0),
  ],
)
def test_only_the_last_whole_box_behind_the_thinking_counts(said, reward):
  assert boxed_math_match(said, "4") == reward


@pytest.mark.parametrize(
  "gold", ["", "  ", r"\frac{1}{", "((", "2^{10^{10}}", "(10^9)!", "1+" * 200 + "1", None, True, [4]]
)
def test_a_right_answer_that_cannot_be_read_is_refused_when_the_data_load(gold):
  with pytest.raises(ConfigError, match=r"^row 7: "):
    check_gold(gold, "row 7")
  with pytest.raises(ValueError):
    math_match(r"\boxed{4}", gold)


def test_an_answer_taken_out_of_the_reply_needs_no_box():
  assert math_match("1/2", "0.5") == math_match(r"\boxed{1/2}", "0.5") == 1.0
  assert math_match("1/3", "0.5") == math_match("", "0.5") == math_match("It is 0.5.", "0.5") == 0.0


def test_right_answers_may_be_numbers_or_stand_in_a_box_or_in_dollars():
  for gold in (4, 4.0, "4", "$4$", r"\boxed{4}", r"$\boxed{4}$"):
    check_gold(gold)
    assert math_match(r"\boxed{4}", gold) == 1.0 and math_match(r"\boxed{5}", gold) == 0.0


@pytest.mark.parametrize(
  "attack",
  [
    "__import__('os').system('touch x')",
    "().__class__.__bases__",
    "9**9**9",
    "9^{9^{9^9}}",
    "(10^9)!",
    r"\exp(\exp(\exp(100)))",
    r"\sum_{i=1}^{10^{9}} i",
    r"\binom{99999999}{4999999}",
    r"\pi^{\pi^{\pi^{\pi^\pi}}}",
    "(" * 5000,
    r"\sqrt{" * 5000 + "2" + "}" * 5000,
    "+".join(f"x_{{{i}}}^{{99}}" for i in range(1000)),
  ],
)
def test_what_was_said_is_never_evaluated_and_takes_bounded_time(attack, pool, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  started = time.process_time()
  assert math_match(rf"\boxed{{{attack}}}", "5") == 0.0
  assert time.process_time() - started < 5.0
  assert not os.listdir(tmp_path)
  assert asyncio.run(pool.grade("maths", rf"\boxed{{{attack}}}", "5")) == 0.0


def test_a_long_answer_costs_no_time():
  begin = time.process_time()
  assert math_match("1 000" * 40_000 + ".", "4") == 0.0
  assert math_match("1" + " 000" * 40_000 + ".", "4") == 0.0
  assert time.process_time() - begin < 5.0
