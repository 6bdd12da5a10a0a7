"""A test for noisy curves: has one stopped rising? Patience on its running mean, as in early stopping."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


def running_mean(values: Sequence[float], window: int) -> Float[np.ndarray, "n"]:
  """Means of `window` values in a row, for every place where there are so many; double."""
  sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, np.float64)]))
  return (sums[window:] - sums[:-window]) / window


def plateaued(values: Sequence[float], *, window: int, patience: int, gain: float) -> bool:
  """Decides if a curve has stopped rising: the best of its last running means is no better than the best before.

  A curve whose running mean rises by `gain` or more in every `patience` values never plateaus; one that falls, or stays
  where it is, does after `window + patience` values, and noise on it can only delay that by what it adds to the best.

  Args:
    values: one per measurement, in order; those that are not finite (undefined) are left out.
    window: values per mean.
    patience: means that have to bring the gain.
    gain: the smallest difference that counts as rising.

  >>> plateaued([0.0, 0.1, 0.2, 0.3], window=1, patience=2, gain=0.05)
  False
  >>> plateaued([0.0, 0.1, 0.2, 0.21, 0.21], window=1, patience=2, gain=0.05)
  True
  """
  values = np.asarray(values, np.float64)
  values = values[np.isfinite(values)]
  if len(values) < window + patience:
    return False

  means = running_mean(values, window)
  return bool(means[-patience:].max() - means[:-patience].max() < gain)
