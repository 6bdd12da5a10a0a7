"""The progress of a phase: a rich bar on a terminal, and an occasional log line anywhere else."""

from __future__ import annotations

import logging as python_logging
import math
import sys
import time
from collections.abc import Callable

import rich.console
import rich.progress
from absl import logging


class Progress:
  """Shows step, rate, time left and the few numbers that tell whether a run is healthy.

      with Progress("train", total=1000, start=state_step) as progress:
        progress.update(step, reward=0.42, lag=1.3, buffer=17, success=0.81)

  Values that are None or NaN are left out. On a terminal the bar stays at the bottom, under the log; otherwise one log
  line appears at most every `log_seconds`, and always for the last step.
  """

  def __init__(
    self,
    description: str,
    total: int,
    start: int = 0,
    *,
    log_seconds: float = 10.0,
    console: rich.console.Console | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Prepares the display; `total` counts all steps of the phase, `start` those that an earlier run has done."""
    self._description, self._total, self._start = description, total, start
    self._log_seconds, self._clock = log_seconds, clock
    self._console = console or rich.console.Console(stderr=True)
    self._began = self._last_log = clock()
    self._step = start
    self._bar: rich.progress.Progress | None = None
    self._log_streams: list[tuple[python_logging.StreamHandler, object]] = []

  def __enter__(self) -> Progress:
    self._began = self._last_log = self._clock()
    if not self._console.is_terminal:
      return self

    self._bar = rich.progress.Progress(
      rich.progress.TextColumn("[bold]{task.description}"),
      rich.progress.BarColumn(bar_width=24),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TextColumn("{task.fields[facts]}"),
      rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
      console=self._console,
    )
    self._task = self._bar.add_task(self._description, total=self._total, completed=self._start, facts="")
    self._bar.start()

    # The bar replaced sys.stderr by a proxy that prints above it; the log handler still holds the old stream.
    handler = logging.get_absl_handler().python_handler
    self._log_streams = [(handler, handler.setStream(sys.stderr))]
    return self

  def __exit__(self, *exception: object) -> None:
    if self._bar is None:
      return
    for handler, stream in self._log_streams:
      handler.setStream(stream)
    self._bar.stop()
    self._bar = None

  def update(self, step: int, **values: float | None) -> None:
    """Reports that `step` steps of the phase are done, with the latest `values`."""
    self._step = step
    now = self._clock()
    facts = self._facts(now, values)
    if self._bar is not None:
      self._bar.update(self._task, completed=step, facts=facts)
    elif now - self._last_log >= self._log_seconds or step >= self._total:
      self._last_log = now
      logging.info("%s %d/%d  %s  %s left", self._description, step, self._total, facts, self._time_left(now))

  def _rate(self, now: float) -> float:
    """Computes the steps per second of this run."""
    return (self._step - self._start) / max(now - self._began, 1e-9)

  def _facts(self, now: float, values: dict[str, float | None]) -> str:
    shown = [f"{self._rate(now):.2f} steps/s"]
    shown += [
      f"{name} {value:.3g}" for name, value in values.items() if value is not None and not math.isnan(float(value))
    ]
    return "  ".join(shown)

  def _time_left(self, now: float) -> str:
    rate = self._rate(now)
    if rate <= 0:
      return "?"
    seconds = round((self._total - self._step) / rate)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
