"""The log of a phase: metrics of each step, fetched one step late, to the metrics file and the progress display."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from sao_jax.report.health import Health
from sao_jax.report.metrics import DelayedFetch, MetricsWriter
from sao_jax.report.progress import Progress


class RunLog:
  """A context manager; `push` a step's metrics while the device still computes them."""

  def __init__(
    self,
    workdir: str | os.PathLike,
    phase: str,
    *,
    total: int,
    start: int = 0,
    restored_step: int | None = None,
    every: int = 1,
    max_skipped_updates: int = 10,
    facts: Mapping[str, str] | None = None,
    writes: bool = True,
    trackers: Sequence[str] = ("tensorboard",),
    project: str = "sao_jax",
  ):
    """Opens the metrics file, without its lines beyond `restored_step`.

    Args:
      workdir: the run's folder.
      phase: name of the phase.
      total: train steps of the phase.
      start: train steps done before.
      restored_step: step of the checkpoint that the phase goes on from; None begins it.
      every: steps between two written lines; every step reaches the display.
      max_skipped_updates: steps in a row whose updates are not finite, from which on the phase has `diverged`.
      facts: display names of metrics, as in {"reward": "reward_mean"}.
      writes: False in the other processes of a run, which leave files and display to the first one.
      trackers: of `training.trackers`.
      project: the name that they list the run under.
    """
    metrics = {"restored_step": restored_step, "trackers": trackers, "project": project}
    self._writer = MetricsWriter(workdir, phase, **metrics) if writes else None
    self._progress = Progress(phase, total=total, start=start) if writes else None
    self._delayed = DelayedFetch()
    self._every, self._names = every, dict(facts or {})
    self._facts: dict[str, Any] = {}
    self._health, self._max_skipped_updates = Health(), max_skipped_updates

  def __enter__(self) -> RunLog:
    if self._progress is not None:
      self._progress.__enter__()
    return self

  def __exit__(self, *exception: object) -> None:
    if self._writer is not None:
      self._progress.__exit__(*exception)
      self._writer.close()

  def push(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Keeps the metrics of `step`, and logs those of the step before, which has long finished."""
    self._log(self._delayed.push(step, metrics))

  def flush(self) -> None:
    """Logs what was pushed last, and waits for it."""
    self._log(self._delayed.flush())

  @property
  def skipped_in_a_row(self) -> int:
    """Steps up to the last one logged whose updates were left out since something was not finite."""
    return self._health.skipped_in_a_row

  @property
  def diverged(self) -> bool:
    """True once there are so many of them that the phase should end."""
    return self.skipped_in_a_row >= self._max_skipped_updates

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Writes a line of its own, as an evaluation does."""
    if self._writer is not None:
      self._writer.write(step, metrics)

  def note(self, **facts: Any) -> None:
    """Sets facts that the display shows from now on."""
    self._facts |= facts

  def _log(self, fetched: list[tuple[int, dict[str, Any]]]) -> None:
    for step, metrics in fetched:
      self._facts |= {fact: metrics.get(name) for fact, name in self._names.items()}

      # An alarm is said as it begins, and stands in the line of its step, whichever lines are written.
      alarms = self._health.look(metrics)
      if self._writer is None:
        continue
      for alarm in alarms:
        level = logging.WARNING if alarm.level == "warning" else logging.INFO
        logging.log(level, "Step %d: %s", step, alarm.text)
      if alarms or step % self._every == 0:
        self._writer.write(step, metrics | ({"alarms": [str(alarm) for alarm in alarms]} if alarms else {}))
      self._progress.update(step, **self._facts)
