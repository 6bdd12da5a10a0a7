"""Exactly one finite scalar per episode (case V6)."""

from __future__ import annotations

import decimal
import fractions
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.episode import EnvironmentFailure, GraderFailure
from sao_jax.rewards.scalar import LARGEST, check_reward


@pytest.mark.parametrize(
  "reward, expected",
  [(1, 1.0), (0.5, 0.5), (-2, -2.0), (np.float32(0.25), 0.25), (np.int64(3), 3.0), (np.array(0.5), 0.5)]
  + [(fractions.Fraction(1, 4), 0.25), (np.float16(1), 1.0), (np.zeros((), np.int8), 0.0)],
)
def test_numbers_become_floats(reward, expected):
  value = check_reward(reward, "env")
  assert type(value) is float and value == expected


@pytest.mark.parametrize(
  "reward",
  [
    None,
    math.nan,
    math.inf,
    -math.inf,
    np.nan,
    np.float32("inf"),
    10**400,
    1e20,
    -3e38,
    True,
    False,
    np.bool_(True),
    np.array(True),
  ]
  + ["1", b"1", "", [1.0], (1.0,), {}, {"reward": 1.0}, np.array([1.0]), np.array([0.5, 0.5]), np.zeros((0,))]
  + [1j, np.complex64(1), decimal.Decimal("1"), object(), np.array("1"), np.array(None), lambda: 1.0]
  + [1e20, -3e38],
)
def test_everything_else_is_a_failure_of_the_grader(reward):
  with pytest.raises(GraderFailure) as caught:
    check_reward(reward, "env")
  assert isinstance(caught.value, EnvironmentFailure)
  assert caught.value.environment == "env" and not caught.value.retryable
  assert len(str(caught.value)) < 300


@given(st.floats())
def test_every_float_is_kept_or_refused(value: float):
  if abs(value) <= LARGEST:
    assert check_reward(value, "env") == value
  else:
    with pytest.raises(GraderFailure):
      check_reward(value, "env")
