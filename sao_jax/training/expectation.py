"""An expectation: an ideal schedule of the episodes seen so far, said once and written beside what is measured."""

from __future__ import annotations

import math
from typing import NamedTuple

from absl import logging

from sao_jax.config import RolloutConfig
from sao_jax.rollout.event_model import LoopSettings, expect
from sao_jax.rollout.rollout_loop import RolloutLoop

BATCHES = 2  # that must have ended before anything is expected of the rest
BIASED = 0.9  # episodes used, as a share of the mean duration of all: below, training is biased to short ones


class Expected(NamedTuple):
  """The two figures that a choice of eta and tau decides.

  Attributes:
    used_over_generated: mean duration of the episodes trained on, as a share of that of all.
    dropped: share of the episodes that grow too old.
  """

  used_over_generated: float
  dropped: float


class Expectation:
  """Plays the event model once, as soon as enough episodes have ended; on a resume, before the first step.

  Attributes:
    expected: the figures; NaN before.
  """

  def __init__(self, config: RolloutConfig, places: int):
    """`places`: episodes at the same time."""
    self.expected = Expected(math.nan, math.nan)
    self._config, self._places, self._said = config, places, False

  def look(self, loop: RolloutLoop) -> None:
    """Expects something, and says it, once there is enough to go by."""
    if self._said:
      return
    with loop.ledger.lock:
      seconds, sums = list(loop.buffer.statistics.recent_seconds), loop.buffer.statistics.summary()
    if len(seconds) < min(BATCHES * self._config.batch_size, 256) or not sums["steps"]:
      return
    self._said = True
    self.expected = self._expect(seconds, sums["busy_seconds"] / sums["steps"])

  def _expect(self, seconds: list[float], train_seconds: float) -> Expected:
    """Plays the model, and says what comes out."""
    config = self._config
    drops = config.staleness == "drop" and config.max_staleness >= 0
    settings = LoopSettings(
      slots=self._places,
      admission_staleness=config.admission_staleness,
      max_staleness=config.max_staleness if drops else -1,
      train_seconds=train_seconds,
      batch_size=config.batch_size,
      steps=min(max(40, 4 * config.max_staleness), 200),
      timeout=math.inf,  # the episodes seen have ended, however long they took
    )
    record = expect(settings, seconds)
    used, dropped = record.used_latency / record.whole_latency, record.dropped / record.generated

    # One sentence, with the remedy where it is needed.
    mean, longest = sum(seconds) / len(seconds), max(seconds)
    remedy = " Raise rollout.max_staleness or set rollout.staleness='mask'." if used < BIASED else ""
    logging.info(
      "Staleness: with eta = %d, tau = %d (%s), %d episodes at a time of %.3g s (longest %.3g s) and steps of "
      "%.3g s, an ideal schedule drops %.1f %% and trains on episodes of %.2f times the mean duration, at a mean lag "
      "of %.1f.%s",
      config.admission_staleness,
      config.max_staleness,
      config.staleness,
      self._places,
      mean,
      longest,
      train_seconds,
      100 * dropped,
      used,
      record.lags.mean(),
      remedy,
    )
    return Expected(used, dropped)
