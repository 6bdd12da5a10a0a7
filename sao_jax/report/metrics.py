"""Metrics of a run: one JSON line per step, the same numbers for experiment trackers, and reading them back.

The JSONL file is the record. Each line is written at once, so a kill loses at most the line in progress. A resumed run
first drops the lines beyond its restored step, so no step appears twice.
"""

from __future__ import annotations

import io
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sao_jax.configuration.paths import located
from sao_jax.report.line_file import LineFile
from sao_jax.report.trackers import make_trackers

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
  """Appends the metrics of one phase ("sft", "value_pretraining", "train", ...) of a run to `workdir`.

  Use it as a context manager, or call `close`. TensorBoard events go to `workdir/tensorboard/<phase>` when tensorboardX
  is installed; otherwise the log says so once, and the JSONL file is written all the same.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    phase: str = "train",
    *,
    restored_step: int | None = None,
    trackers: Sequence[str] = ("tensorboard",),
    project: str = "sao_jax",
  ):
    """Opens the files, and drops this phase's lines beyond `restored_step`; lines of other phases stay.

    Args:
      workdir: the run's folder.
      phase: name of the phase.
      restored_step: the last step whose effects the restored state contains. None is a fresh start of the phase: all
        its lines are dropped.
      trackers: where the scalars go as well, see `trackers`.
      project: the name that trackers list the run under.
    """
    self._phase = phase
    path = pathlib.Path(workdir) / METRICS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_lines_after(path, phase, restored_step)
    self._file = LineFile(path)
    self._trackers = make_trackers(trackers, path.parent, phase, restored_step, project)

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Writes the line {"step", "phase", **metrics}.

    Values are numbers, strings, or arrays of at most a few hundred numbers. Non-finite numbers are written as null,
    which readers take as "undefined".
    """
    line = {"step": int(step), "phase": self._phase} | {key: to_json(value) for key, value in metrics.items()}
    self._file.append(line)
    scalars = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
    for tracker in self._trackers:
      tracker.write(int(step), scalars)

  def close(self) -> None:
    """Closes the file and the trackers; further calls do nothing."""
    self._file.close()
    for tracker in self._trackers:
      tracker.close()

  def __enter__(self) -> MetricsWriter:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()


class DelayedFetch:
  """Holds the device metrics of a step until the next step has been dispatched.

  Reading a metric waits for the step that computes it. Reading one step late therefore never leaves the device idle:

      state, metrics = train_step(state, batch)  # dispatched, still running
      for step, values in delayed.push(step, metrics):  # the previous step, long since finished
        writer.write(step, values)
  """

  def __init__(self) -> None:
    self._pending: tuple[int, Any] | None = None

  def push(self, step: int, metrics: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Keeps `metrics` and returns the previous step's as [(step, host values)], or [] on the first call."""
    previous = self.flush()
    self._pending = (step, metrics)
    return previous

  def flush(self) -> list[tuple[int, dict[str, Any]]]:
    """Returns the pending metrics, and waits for them; call it once after the last step."""
    pending, self._pending = self._pending, None
    return [] if pending is None else [(pending[0], dict(jax.device_get(pending[1])))]


def read_metrics(workdir: str | os.PathLike, phase: str | None = None) -> list[dict[str, Any]]:
  """Reads the metric lines of `workdir` in order, of one `phase` or of all; [] without a file, torn lines left out.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as workdir:
  ...   with MetricsWriter(workdir, "train") as writer:
  ...     writer.write(1, {"reward_mean": 0.25, "lag_mean": math.nan})
  ...   read_metrics(workdir, "train")
  [{'step': 1, 'phase': 'train', 'reward_mean': 0.25, 'lag_mean': None}]
  """
  return list(metric_lines(workdir, phase))


def metric_lines(workdir: str | os.PathLike, phase: str | None = None, *, having: str = "") -> Iterator[dict[str, Any]]:
  """Yields what `read_metrics` returns, one line at a time, so that a long run needs no memory.

  Lines without the text `having` are left out, and not even parsed.
  """
  lines = valid_lines(located(workdir) / METRICS_FILE, having)
  return (line for line in lines if phase is None or line.get("phase") == phase)


def evaluated_versions(workdir: str | os.PathLike, phase: str) -> set[int]:
  """Collects the policy versions whose held-out success has been measured."""
  lines = metric_lines(workdir, phase, having='"heldout_success"')
  return {line["policy_version"] for line in lines if "heldout_success" in line}


def measured_success(workdir: str | os.PathLike, phase: str) -> dict[int, float]:
  """Collects the held-out success of each step that was evaluated; NaN where nothing could be graded."""
  lines = metric_lines(workdir, phase, having='"heldout_success"')
  found = {line["step"]: line["heldout_success"] for line in lines if "heldout_success" in line}
  return {step: math.nan if success is None else success for step, success in found.items()}


def to_json(value: Any) -> Any:
  """Converts a scalar, array, string or sequence to plain JSON; NaN and infinities become None."""
  if isinstance(value, str) or value is None:
    return value
  if isinstance(value, Mapping):
    return {str(key): to_json(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [to_json(item) for item in value]
  plain = np.asarray(value).tolist()
  if isinstance(plain, list):
    return [to_json(item) for item in plain]
  return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def valid_lines(path: pathlib.Path, having: str = "") -> Iterator[dict[str, Any]]:
  """Yields the lines of a JSONL file that name a step, in order; none without a file. A torn line is left out.

  So are those without the text `having`.
  """
  if not path.exists():
    return
  with io.TextIOWrapper(path.open("rb"), encoding="utf-8", errors="replace") as file:
    for text in file:
      line = _parsed(text) if having in text else None
      if line is not None:
        yield line


def _parsed(text: str) -> dict[str, Any] | None:
  """Reads a line of a JSONL file; None for a torn one, as a kill leaves it, and for one that names no step."""
  try:
    line = json.loads(text, parse_constant=lambda name: None)  # NaN and Infinity, of another writer, are no JSON
  except json.JSONDecodeError:
    return None
  return line if isinstance(line, dict) and "step" in line else None


def drop_lines_after(path: pathlib.Path, phase: str, restored_step: int | None) -> None:
  """Rewrites the file, if there is one, without the lines of `phase` beyond `restored_step`, or without any for None.

  Torn lines go, too. A kill leaves the old file or the new one; a file that has nothing to lose stays as it is.
  """
  if not path.exists():
    return
  last_step = -math.inf if restored_step is None else restored_step

  def kept(text: str) -> str:
    line = _parsed(text)
    if line is None or (line.get("phase") == phase and line["step"] > last_step):
      return ""
    foreign = "NaN" in text or "Infinity" in text or not text.endswith("\n")
    return json.dumps(line, allow_nan=False) + "\n" if foreign else text

  # Line by line, so that the file of a long run needs no memory.
  with path.open(encoding="utf-8", errors="replace") as old:
    if all(kept(text) == text for text in old):
      return
    old.seek(0)
    temporary = path.with_suffix(".jsonl.tmp")
    with temporary.open("w", encoding="utf-8") as new:
      new.writelines(map(kept, old))
      new.flush()
      os.fsync(new.fileno())
  os.replace(temporary, path)
