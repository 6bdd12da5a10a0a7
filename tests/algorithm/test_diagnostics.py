"""Explained variance, effective sample size, ratio quantiles and lags."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from sao_jax.algorithm import diagnostics


@pytest.mark.parametrize(
  ("values", "returns", "mask", "expected"),
  [
    ([0.9, 0.2, 0.7, 0.6], [1, 0, 1, 1], [1, 1, 1, 1], 0.72),
    ([0.9, 0.2, np.nan, 0.7, 0.6], [1, 0, np.nan, 1, 1], [1, 1, 0, 1, 1], 0.72),
    ([1, 0, 1], [1, 0, 1], [1, 1, 1], 1.0),
    ([0.5, 0.5, 0.5], [1, 0, 1], [1, 1, 1], 0.0),
    ([0, 1, 0], [1, 0, 1], [1, 1, 1], -3.0),
    ([0.1, 0.5, 0.9], [1, 1, 1], [1, 1, 1], np.nan),
    ([0.1, 0.5, 0.9], [0.1, 0.1, 0.1], [1, 1, 1], np.nan),  # their mean rounds away from 0.1
    ([0.1, 0.5, 0.9], [0, 0, 0], [1, 1, 1], np.nan),
    ([0.1, 0.5], [1, 0], [1, 0], np.nan),
    ([0.1, 0.5], [1, 0], [0, 0], np.nan),
  ],
)
def test_explained_variance(values, returns, mask, expected):
  got = diagnostics.explained_variance(
    np.array(values, np.float32), np.array(returns, np.float32), np.array(mask, bool)
  )
  np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("count", [7, 1000, 33_333])
@pytest.mark.parametrize("reward", [0.1, 0.7, -0.3, 1.0])
def test_equal_rewards_have_no_variance_to_explain(reward, count):
  returns = jnp.full(count, reward, jnp.float32)
  got = diagnostics.explained_variance(jnp.linspace(0, 1, count), returns, jnp.ones(count, bool))
  assert np.isnan(got)


@pytest.mark.parametrize(
  ("weights", "mask", "expected"),
  [
    ([3, 0.1, 0.1, 0.1], [1, 1, 1, 1], 0.3015),
    ([3, 0.1, 0.1, 0.1, np.nan], [1, 1, 1, 1, 0], 0.3015),
    ([1, 1, 1], [1, 1, 1], 1.0),
    ([1, 1, 0, 0], [1, 1, 1, 1], 0.5),
    ([1e-25, 1e-25], [1, 1], 1.0),
    ([0, 0], [1, 1], 0.0),
    ([1, 1], [0, 0], np.nan),
  ],
)
def test_effective_sample_size(weights, mask, expected):
  got = diagnostics.effective_sample_size(np.array(weights, np.float32), np.array(mask, bool))
  np.testing.assert_allclose(got, expected, atol=1e-4)


_quantiles = jax.jit(diagnostics.ratio_quantiles)


@hypothesis.given(st.integers(0, 2**16), st.integers(1, 300))
def test_ratio_quantiles_equal_sorting(seed, count):
  rng = np.random.default_rng(seed)
  log_ratio, mask = np.full(300, np.nan, np.float32), np.zeros(300, bool)
  where = rng.permutation(300)[:count]
  log_ratio[where], mask[where] = rng.normal(size=count), True
  got = _quantiles(log_ratio.reshape(3, 100), mask.reshape(3, 100))
  for name, percent in diagnostics.RATIO_PERCENTILES.items():
    # By rank: np.quantile forms percent * count in floating point, and may miss it by one.
    rank = -(-count * percent // 100)
    expected = np.exp(np.sort(log_ratio[where])[rank - 1].astype(np.float64))
    np.testing.assert_allclose(got[f"ratio_{name}"], expected, rtol=1e-5)


@pytest.mark.parametrize(("value", "expected"), [(1000.0, np.exp(80)), (-1000.0, np.exp(-80)), (0.0, 1.0)])
def test_ratio_quantiles_saturate(value, expected):
  got = _quantiles(np.full((3, 100), value, np.float32), np.ones((3, 100), bool))
  np.testing.assert_allclose(got["ratio_p50"], expected, rtol=1e-5)
  assert np.isnan(_quantiles(np.zeros((3, 100), np.float32), np.zeros((3, 100), bool))["ratio_p50"])


def test_lags():
  """Version 11 trained on a token of version 7 has lag 4; a negative lag is counted as such, never hidden."""
  versions = np.array([[7, 7, 11, 12], [-1, 10, 1, 9]])
  mask = versions > 0
  lags = diagnostics.token_lags(jnp.int32(11), versions, mask)
  np.testing.assert_array_equal(lags, [[4, 4, 0, -1], [0, 1, 10, 2]])
  metrics = diagnostics.lag_metrics(lags, mask, max_lag=4)
  np.testing.assert_array_equal(metrics["lag_histogram"], [1, 1, 1, 0, 2, 0, 0, 0, 1, *[0] * 7])
  assert metrics["lag_negative"] == 1
  assert metrics["lag_overflow"] == 1
  assert metrics["lag_max"] == 10
  np.testing.assert_allclose(metrics["lag_mean"], (4 + 4 - 1 + 1 + 10 + 2) / 7)
  assert metrics["lag_histogram"].sum() + metrics["lag_negative"] == mask.sum()
  x = np.array([[0.1, 0.3, 0.5, 9], [np.nan, 0.7, 9, 0.9]], np.float32)
  means = diagnostics.mean_by_lag(x, lags, mask)
  np.testing.assert_allclose(means, [0.5, 0.7, 0.9, np.nan, 0.2, *[np.nan] * 3, 9, *[np.nan] * 7], rtol=1e-6)


def test_any_lag_has_one_of_sixteen_bins_and_without_a_bound_none_is_an_alarm():
  """Bins of one lag to 7, then of doubling width, so that no bound makes a line of the metrics long."""
  lags = np.array([[0, 7, 8, 15, 16, 1023, 1024, 2**31 - 1]], np.int32)
  mask = np.ones((1, 8), bool)
  metrics = diagnostics.lag_metrics(lags, mask, max_lag=-1)
  assert len(diagnostics.LAG_BINS) == 16
  np.testing.assert_array_equal(metrics["lag_histogram"], [1, *[0] * 6, 1, 2, 1, *[0] * 4, 1, 2])
  assert metrics["lag_overflow"] == 0
  assert diagnostics.lag_metrics(lags, mask, max_lag=1_000_000)["lag_overflow"] == 1


def test_lags_of_an_empty_batch():
  mask = np.zeros((2, 3), bool)
  metrics = diagnostics.lag_metrics(np.zeros((2, 3), np.int32), mask)
  np.testing.assert_array_equal(metrics["lag_histogram"], 0)
  assert np.isnan(metrics["lag_mean"])
  assert np.isnan(metrics["lag_max"])
