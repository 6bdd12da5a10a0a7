"""Measures: a metric of a run and what is made of its curve, by name, as in `critic_grad_norm:spikes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float

from sao_jax.configuration import config_tree
from sao_jax.errors import ConfigError
from sao_jax.report.curves import smooth
from sao_jax.study.series import Series

TAIL = 0.1  # of the updates: the begin and the end of a run
WINDOW = 0.1  # of the points of a curve, over which dips are averaged
RECENT = 5  # steps over which recovery is averaged
RECOVERED = 0.9  # of the level before a switch

# metric -> its curve
Reader = Callable[[str], Series]
NOTHING = float("nan")  # of a metric that a run does not have


def value_of(measure: str, read: Reader) -> float:
  """Computes a measure, "METRIC:SUMMARY", or "METRIC" for its end; NaN for a run without the metric.

  A metric may be a sum of several, as in "rejected_low+rejected_high:mean".

  Args:
    measure: its name.
    read: gives the curve of a metric.
  """
  metric, summary = split_measure(measure)
  return SUMMARIES[summary](read, metric) if len(read(metric).x) else NOTHING


def split_measure(measure: str) -> tuple[str, str]:
  """Splits the name of a measure into metric and summary.

  >>> split_measure("critic_grad_norm:spikes"), split_measure("heldout_success")
  (('critic_grad_norm', 'spikes'), ('heldout_success', 'end'))

  Raises:
    ConfigError: there is no such summary.
  """
  metric, _, summary = measure.partition(":")
  if summary and summary not in SUMMARIES:
    raise ConfigError("measures", f"{measure} has no known summary.", config_tree.nearest(summary, tuple(SUMMARIES)))
  return metric, summary or "end"


def end(curve: Series) -> float:
  """The mean over the last tenth of the updates: of an evaluation now and then, the last one."""
  return float(curve.y[curve.x >= curve.x[-1] * (1.0 - TAIL)].mean())


def begin(curve: Series) -> float:
  """The mean over the first tenth of the updates."""
  return float(curve.y[curve.x <= curve.x[0] + (curve.x[-1] - curve.x[0]) * TAIL].mean())


def worst_dip(curve: Series) -> float:
  """The deepest fall of the smoothed curve below what it had reached; 0 for one that never falls."""
  level = _smoothed(curve)
  return float((np.maximum.accumulate(level) - level).max())


def spikes(curve: Series) -> float:
  """The largest value as a multiple of the median: 1 for a flat curve."""
  middle = float(np.median(curve.y))
  return float(curve.y.max()) / middle if middle else NOTHING


def noise(curve: Series) -> float:
  """The deviation of single values around a slow curve, from the differences of neighbours (von Neumann 1941)."""
  return float(np.sqrt(np.mean(np.diff(curve.y) ** 2) / 2)) if len(curve.y) > 1 else NOTHING


def recovery(curve: Series, phase: Series) -> float:
  """Updates from a switch of what is rewarded to 90 % of the success before it, mean over switches.

  A switch is where more than half of a step's trajectories are those of a later phase. Success is its mean over five
  steps. One that does not recover counts its whole phase, so that the mean is at least this.
  """
  numbers = np.round(np.interp(curve.x, phase.x, phase.y))
  starts = [*np.flatnonzero(np.diff(numbers) > 0) + 1, len(numbers)]
  waits = []
  for first, following in zip(starts[:-1], starts[1:], strict=True):
    # The ten steps before the last five, in which both phases may meet.
    before = curve.y[max(0, first - 15) : max(1, first - 5)].mean()
    recent = [curve.y[max(first, i - RECENT + 1) : i + 1].mean() for i in range(first, following)]
    reached = [i for i, level in enumerate(recent) if i >= RECENT - 1 and level >= RECOVERED * before]
    waits.append(curve.x[first + reached[0]] - curve.x[first] if reached else curve.x[following - 1] - curve.x[first])
  return float(np.mean(waits)) if waits else NOTHING


def _smoothed(curve: Series) -> Float[np.ndarray, " n"]:
  return smooth(curve.y, 2 * int(len(curve.y) * WINDOW / 2) + 1)


def _of_curve(summary: Callable[[Series], float]) -> Callable[[Reader, str], float]:
  return lambda read, metric: summary(_updates(read(metric)))


def _updates(curve: Series) -> Series:
  """Leaves out what comes before the policy's first update: methods without a critic have no warm-up."""
  after = curve.x > 0
  return Series(curve.x[after], curve.y[after]) if after.any() else curve


def _recovery(read: Reader, metric: str) -> float:
  """Finds the metric that tells the phase: `info_phase/NAME` beside `info_success/NAME`."""
  phase = read(f"info_phase/{metric.partition('/')[2]}")
  return recovery(read(metric), phase) if len(phase.x) else NOTHING


SUMMARIES: Mapping[str, Callable[[Reader, str], float]] = {
  "end": _of_curve(end),
  "begin": _of_curve(begin),
  "change": _of_curve(lambda curve: end(curve) - begin(curve)),
  "mean": _of_curve(lambda curve: float(curve.y.mean())),
  "median": _of_curve(lambda curve: float(np.median(curve.y))),
  "max": _of_curve(lambda curve: float(curve.y.max())),
  "worst_dip": _of_curve(worst_dip),
  "spikes": _of_curve(spikes),
  "noise": _of_curve(noise),
  "recovery": _recovery,
}
