"""Means over seeds with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

RESAMPLES = 10_000


class Interval(NamedTuple):
  """A mean and its 95 % interval; without a second value the interval is unknown, NaN."""

  mean: float
  low: float
  high: float

  def __str__(self) -> str:
    return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]" if np.isfinite(self.low) else f"{self.mean:.3f}"


def mean_interval(values: Sequence[float] | Float[np.ndarray, " n"], confidence: float = 0.95) -> Interval:
  """The mean of a value for each seed, with its percentile bootstrap interval (Efron 1979), always the same one.

  >>> mean_interval([0.9, 0.92, 0.94]).mean
  0.92
  """
  values = np.asarray(values, np.float64)
  if len(values) < 2:
    return Interval(float(values.mean()) if len(values) else float("nan"), float("nan"), float("nan"))
  rng = np.random.default_rng(0)
  means = values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
  low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
  return Interval(round(float(values.mean()), 12), float(low), float(high))


def difference_interval(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> Interval:
  """Mean of the differences `first` less `second`, with its interval.

  Args:
    first, second: a value for each seed, of the same seeds in the same order, which share their start.
    confidence: of the interval.
  """
  return mean_interval(np.asarray(first, np.float64) - np.asarray(second, np.float64), confidence)
