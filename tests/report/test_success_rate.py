"""Success rates and their Wilson intervals."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import pytest

from sao_jax.report.success_rate import success, wilson_interval


@pytest.mark.parametrize(
  "successes, trials, low, high",
  [
    (5, 10, 0.2366, 0.7634),  # the textbook example
    (0, 10, 0.0, 0.2775),
    (10, 10, 0.7225, 1.0),
    (450, 500, 0.8706, 0.9234),
    (0, 0, 0.0, 1.0),
  ],
)
def test_wilson_interval(successes, trials, low, high):
  assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)


@hypothesis.given(
  st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.999)
)
def test_the_interval_contains_the_rate_and_widens_with_confidence(counts, confidence):
  successes, trials = counts
  low, high = wilson_interval(successes, trials, confidence)
  assert 0.0 <= low <= successes / trials <= high <= 1.0
  wider = wilson_interval(successes, trials, (1 + confidence) / 2)
  assert wider[0] <= low and high <= wider[1]
  # Failures are successes seen from the other side.
  assert wilson_interval(trials - successes, trials, confidence) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize("arguments", [(3, 2), (-1, 2), (1, 2, 0.0), (1, 2, 1.0)])
def test_impossible_arguments(arguments):
  with pytest.raises(ValueError):
    wilson_interval(*arguments)


def test_success_reads_well():
  result = success(450, 500)
  assert str(result) == "90.0% (450/500, 95% interval 87.1%–92.3%)"
  assert math.isnan(success(0, 0).rate) and (success(0, 0).low, success(0, 0).high) == (0.0, 1.0)
