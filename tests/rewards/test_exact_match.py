"""Verifiers parse answers and never evaluate them (case V7)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.rewards.exact_match import integer_match, parse_integer

HOSTILE = [
  "9**9**9",
  "__import__('os').system('touch x')",
  "().__class__.__bases__",
  "1e999999999",
  "9" * 100_000,
  "(" * 100_000,
  "0x10",
  "1_000",
  "٣",  # a digit for int(), not for us
  "²",
  "7 7",
  "--7",
  "7\x00",
  "7.0",
  "nan",
  "",
  " ",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_no_integer(text):
  assert parse_integer(text) is None
  assert integer_match(text, 7) == 0.0


@given(st.integers(-(10**17), 10**17))
def test_integers_match_themselves_only(value: int):
  assert integer_match(str(value), value) == 1.0
  assert integer_match(f" {value}\n", value) == 1.0
  assert integer_match(str(value + 1), value) == 0.0


@pytest.mark.parametrize("text, value", [("007", 7), ("+7", 7), ("-0", 0), ("-12", -12)])
def test_spellings(text, value):
  assert parse_integer(text) == value


def test_no_answer_earns_nothing():
  assert integer_match(None, 0) == 0.0
