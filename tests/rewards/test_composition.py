"""Rewards made of parts: the product of quality and style, and DAPO's soft penalty."""

from __future__ import annotations

import math

import pytest

from sao_jax.episode import GraderFailure
from sao_jax.errors import ConfigError
from sao_jax.rewards.composition import overlong_penalty, quality_times_style


@pytest.mark.parametrize(
  "quality, style, reward", [(1, 1, 1.0), (1, 0, 0.0), (0, 1, 0.0), (0.5, 0.5, 0.25), (4, 0.5, 2)]
)
def test_quality_times_style_reports_its_parts(quality, style, reward):
  assert quality_times_style(quality, style, "env") == (reward, {"reward_quality": quality, "reward_style": style})


@pytest.mark.parametrize(
  "quality, style", [(-1, -1), (-1, 1), (1, 1.5), (1, -0.1), (math.nan, 1), (1, None), (True, 1)]
)
def test_parts_outside_of_their_range_are_a_failure_of_the_grader(quality, style):
  with pytest.raises(GraderFailure, match="'env'"):
    quality_times_style(quality, style, "env")


# The numbers of the paper: 16,384 tokens are expected, and 4,096 more are punished little by little.
@pytest.mark.parametrize(
  "length, penalty",
  [
    (0, 0.0),
    (16384, 0.0),
    (16385, -1 / 4096),
    (17408, -0.25),
    (18432, -0.5),
    (20480, -1.0),
    (20481, -1.0),
    (10**9, -1),
  ],
)
def test_the_soft_penalty_is_that_of_dapo(length, penalty):
  assert overlong_penalty(length, max_length=20480, cache=4096) == penalty


@pytest.mark.parametrize("cache", [0, -1, 20481])
def test_a_stretch_that_is_none_is_refused(cache):
  with pytest.raises(ConfigError, match="^cache: "):
    overlong_penalty(1, 20480, cache)
