"""Experiment trackers: the scalars of a run for TensorBoard, Weights & Biases or Trackio, beside the metrics file.

`metrics.jsonl` is the record, and a tracker is a copy of it for looking at. So no tracker ends a run: one that fails is
left out from then on, and the log says so.
"""

from __future__ import annotations

import json
import os
import pathlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from absl import logging

from sao_jax.report.tensorboard import TensorBoardEvents

IDS_FILE = "trackers.json"  # of the runs that trackers know a phase by


class Tracker(Protocol):
  """A place where scalars go, step by step."""

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Sends the scalars of a step; raises nothing."""

  def close(self) -> None:
    """Ends the run there; further calls do nothing."""


def make_trackers(
  names: Sequence[str], workdir: pathlib.Path, phase: str, restored_step: int | None, project: str
) -> list[Tracker]:
  """Makes the trackers of a phase.

  Args:
    names: of `training.trackers`.
    workdir: the run's folder; its name is the run's there.
    phase: each phase is a run of its own, and those of a workdir are a group.
    restored_step: the step that the phase goes on from; None begins another run.
    project: where the run is listed.
  """
  trackers: list[Tracker] = []
  for name in names:
    if name == "tensorboard":
      trackers.append(TensorBoardEvents(workdir / "tensorboard" / phase, restored_step))
    else:
      known = _run_id(workdir, f"{name}/{phase}", begins=restored_step is None)
      trackers.append(_Remote(name, _RUNS[name], workdir, phase, known, project))
  return trackers


class _Remote:
  """A run of another package, begun with the first step."""

  def __init__(self, name: str, begin: Callable[..., Any], *about: Any):
    self._name, self._begin, self._about = name, begin, about
    self._run, self._over = None, False

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    if self._over:
      return
    try:
      if self._run is None:
        self._run = self._begin(*self._about)
      self._run.log(dict(scalars) | {"step": step}, step)
    except Exception as error:  # of the network, an account, a service: whatever it is, the run goes on
      self._over = True
      logging.error("%s gets no further metrics: %r. metrics.jsonl has all.", self._name, error)

  def close(self) -> None:
    run, self._run, self._over = self._run, None, True
    if run is None:
      return
    try:
      run.finish()
    except Exception as error:
      logging.error("The last metrics of %s may be missing: %r.", self._name, error)


class _WandbRun:
  """Weights & Biases: `WANDB_MODE=offline` keeps the run in the workdir, for `wandb sync`."""

  def __init__(self, workdir: pathlib.Path, phase: str, run_id: str, project: str):
    import wandb  # an optional extra

    self._run = wandb.init(
      project=project,
      id=run_id,
      name=f"{workdir.name}/{phase}",
      group=workdir.name,
      dir=str(workdir),
      config=_recorded_config(workdir),
      resume="allow",
      settings=wandb.Settings(silent=True, console="off"),
    )
    # A resumed run repeats steps, which a counter of wandb's own would refuse.
    self._run.define_metric("*", step_metric="step")

  def log(self, scalars: Mapping[str, float], step: int) -> None:
    del step
    self._run.log(scalars)

  def finish(self) -> None:
    self._run.finish()


class _TrackioRun:
  """Trackio: a local database (`TRACKIO_DIR`), which `trackio show` displays, or a Space (`TRACKIO_SPACE_ID`)."""

  def __init__(self, workdir: pathlib.Path, phase: str, run_id: str, project: str):
    import trackio  # an optional extra

    self._run = trackio.init(
      project,
      name=f"{workdir.name}/{phase}/{run_id}",
      group=workdir.name,
      config=_recorded_config(workdir),
      resume="allow",
      embed=False,
      auto_log_gpu=False,
      auto_log_cpu=False,
    )

  def log(self, scalars: Mapping[str, float], step: int) -> None:
    self._run.log({name: value for name, value in scalars.items() if name != "step"}, step=step)

  def finish(self) -> None:
    self._run.finish()


_RUNS: dict[str, Callable[..., Any]] = {"wandb": _WandbRun, "trackio": _TrackioRun}


def _run_id(workdir: pathlib.Path, key: str, *, begins: bool) -> str:
  """Returns the id of the run that a phase is known by; another one for a phase that begins anew."""
  path = workdir / IDS_FILE
  try:
    ids = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError):
    ids = {}
  if begins or key not in ids:
    ids[key] = secrets.token_hex(4)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(ids), encoding="utf-8")
    os.replace(temporary, path)
  return ids[key]


def _recorded_config(workdir: pathlib.Path) -> dict[str, Any]:
  """Reads the configuration that the run has recorded, for the tracker's page; empty where there is none."""
  try:
    return dict(json.loads((workdir / "config.json").read_text(encoding="utf-8")))
  except (OSError, ValueError):
    return {}
