"""A success rate with its Wilson confidence interval."""

from __future__ import annotations

import dataclasses
import math
import statistics


@dataclasses.dataclass(frozen=True)
class Success:
  """A success rate: `rate` = successes / trials, with the confidence interval [`low`, `high`]."""

  successes: int
  trials: int
  confidence: float
  rate: float
  low: float
  high: float

  def __str__(self) -> str:
    if not self.trials:
      return "undefined (nothing was graded)"
    return (
      f"{self.rate:.1%} ({self.successes}/{self.trials}, {self.confidence:.0%} interval {self.low:.1%}–{self.high:.1%})"
    )


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
  """Computes the Wilson score interval of a binomial rate, which stays inside [0, 1] and is honest near 0 and 1.

  Without trials it is (0, 1). Raises ValueError for impossible counts.
  Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927).
  """
  if not 0 <= successes <= trials:
    raise ValueError(f"need 0 <= successes <= trials, got {successes} of {trials}")
  if not 0.0 < confidence < 1.0:
    raise ValueError(f"confidence must lie strictly between 0 and 1, got {confidence}")
  if trials == 0:
    return 0.0, 1.0

  # The rates p at which |rate - p| is z standard errors of p itself.
  z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
  rate = successes / trials
  scale = 1 + z * z / trials
  center = (rate + z * z / (2 * trials)) / scale
  half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / scale

  # At the ends the exact limits are 0 and 1; rounding must not leave 1e-17 or 0.9999999999999999.
  low = 0.0 if successes == 0 else center - half
  high = 1.0 if successes == trials else center + half
  return low, high


def success(successes: int, trials: int, confidence: float = 0.95) -> Success:
  """Computes the rate with its Wilson interval; the rate of no trials is NaN.

  >>> print(success(450, 500))
  90.0% (450/500, 95% interval 87.1%–92.3%)
  """
  low, high = wilson_interval(successes, trials, confidence)
  rate = successes / trials if trials else math.nan
  return Success(successes, trials, confidence, rate, low, high)
