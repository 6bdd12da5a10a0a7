"""Runs a study: the launchers as processes, a few at a time; what is done is not done again."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from sao_jax.errors import RunError
from sao_jax.interrupt import POLL, Interrupted, StopSignal
from sao_jax.study.costs import Costs, costs_of
from sao_jax.study.plan import Run, Study

RECORD = "study.json"  # in the folder of a run that is done
LOG = "log.txt"  # what the launchers of a run said
ENVIRONMENT = {
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"
}  # equal programs of many runs: small ones are kept, too
FOLDERS = {"sft": "sft", "pretrain_value": "value_pretraining"}  # of checkpoints, by phase
GRACE = 60.0  # seconds that a run may take to save when the study is interrupted

# (arguments behind `python -m`, log file) -> exit status
Launch = Callable[[Sequence[str], pathlib.Path], int]


class Processes:
  """Starts launchers and waits for them; an interrupted study asks them to save, and takes no new ones."""

  def __init__(self) -> None:
    self._running: set[subprocess.Popen] = set()
    self._lock = threading.Lock()
    self.stopped = False

  def __call__(self, arguments: Sequence[str], log: pathlib.Path) -> int:
    """Runs `python -m arguments...`, with what it says appended to `log`; returns its exit status."""
    with log.open("ab") as file, self._lock:
      if self.stopped:
        return -1
      process = subprocess.Popen(
        [sys.executable, "-m", *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        start_new_session=True, env=ENVIRONMENT | os.environ,
      )  # fmt: skip
      self._running.add(process)
    try:
      return process.wait()
    finally:
      with self._lock:
        self._running.discard(process)

  def stop(self) -> None:
    """Interrupts what runs, which then saves, and kills what has not ended in time."""
    with self._lock:
      self.stopped, running = True, list(self._running)
    for process in running:
      process.terminate()
    for process in running:
      try:
        process.wait(GRACE)
      except subprocess.TimeoutExpired:
        process.kill()


def run_study(
  study: Study,
  output: pathlib.Path,
  *,
  jobs: int = 1,
  only: Sequence[str] = (),
  launch: Launch | None = None,
  interrupt: StopSignal | None = None,
) -> dict[str, str]:
  """Runs what is not done; an interrupted study goes on where each of its runs has saved.

  Args:
    study: the runs.
    output: the study's folder; a run has VARIANT/seed_N in it.
    jobs: runs at the same time.
    only: variants to run, all of them if empty.
    launch: starts a launcher and waits for it; None: as a process.
    interrupt: asks the runs to save and ends the study.

  Returns:
    "done" or what went wrong for each run, by its folder.

  Raises:
    Interrupted: the study was asked to stop.
  """
  processes = None if launch else Processes()
  launch = launch or processes
  output.mkdir(parents=True, exist_ok=True)
  chosen = [run for run in study.runs if not only or run.variant in only]
  starts = _Starts(study, output, launch)

  # A run waits for the shared start of its seed, which the first of them makes.
  with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
    futures = {run: pool.submit(_run, study, run, output, starts, launch) for run in chosen}
    try:
      while concurrent.futures.wait(futures.values(), timeout=POLL).not_done:
        if interrupt is not None and interrupt.requested:
          raise Interrupted
    except BaseException:
      for future in futures.values():
        future.cancel()
      if processes is not None:
        processes.stop()
      raise
  return {run.folder: future.result() for run, future in futures.items()}


def _run(study: Study, run: Run, output: pathlib.Path, starts: _Starts, launch: Launch) -> str:
  """Trains one run, unless that is done; returns "done", or what went wrong."""
  workdir, fields = output / run.folder, study.fields_of(run.variant)
  try:
    if done_record(study, run, output) is not None:
      return "done"
  except RunError as error:
    return str(error)

  # It begins with the networks that all variants of its seed begin with.
  try:
    starts.bring(run, workdir)
  except RunError as error:
    return str(error)
  logging.info("%s: begins, or goes on.", run.folder)
  status = launch(["launch.train", *_arguments(study, workdir, run.seed, fields)], workdir / LOG)
  if status:
    return f"launch.train ended with status {status}; {workdir / LOG} says why"

  # From here on it is done: the record is the last thing that is written.
  _write_record(study, run, workdir, fields, costs_of(workdir))
  logging.info("%s: done.", run.folder)
  return "done"


class _Starts:
  """The phases that the variants of a seed share, in start/seed_N."""

  def __init__(self, study: Study, output: pathlib.Path, launch: Launch):
    self._study, self._output, self._launch = study, output, launch
    self._locks = {seed: threading.Lock() for seed in study.seeds}
    self._failed: dict[int, str] = {}

  def bring(self, run: Run, workdir: pathlib.Path) -> None:
    """Makes the start of a seed, if nobody has, and copies it into a run that has not begun.

    Raises:
      RunError: it could not be made, or was made with other fields.
    """
    study, seed = self._study, run.seed
    if not study.start:
      workdir.mkdir(parents=True, exist_ok=True)
      return
    start = self._output / f"start/seed_{seed}"
    with self._locks[seed]:
      if seed in self._failed:
        raise RunError(self._failed[seed])
      if (record := read_record(start)) is None:
        self._make(seed, start)
      elif record != self._record:
        raise RunError(f"{start} was made with other fields or phases: use another --output")

    # Whole or not at all: a copy that was cut looks like a run that lost its start.
    if not workdir.exists():
      unfinished = workdir.with_name(f".{workdir.name}.unfinished")
      shutil.rmtree(unfinished, ignore_errors=True)
      left_out = [FOLDERS["pretrain_value"]] if run.variant in study.cold else []
      shutil.copytree(start, unfinished, ignore=shutil.ignore_patterns(RECORD, LOG, *left_out))
      os.replace(unfinished, workdir)

  def _make(self, seed: int, start: pathlib.Path) -> None:
    start.mkdir(parents=True, exist_ok=True)
    for phase in self._study.start:
      status = self._launch([f"launch.{phase}", *_arguments(self._study, start, seed, self._study.fields)], start / LOG)
      if status:
        self._failed[seed] = f"launch.{phase} of seed {seed} ended with status {status}; {start / LOG} says why"
        raise RunError(self._failed[seed])
    (start / RECORD).write_text(json.dumps(self._record) + "\n", encoding="utf-8")

  @property
  def _record(self) -> dict[str, Any]:
    study = self._study
    return {"phases": list(study.start), "config": study.config, "fields": _plain(study.fields)}


def read_record(workdir: pathlib.Path) -> dict[str, Any] | None:
  """Reads the record of a run that is done; None for one that is not."""
  try:
    return json.loads((workdir / RECORD).read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return None


def done_record(study: Study, run: Run, output: pathlib.Path) -> dict[str, Any] | None:
  """Reads the record of a study's run; None for one that is not done.

  Raises:
    RunError: it was made with another configuration or other fields than the study's.
  """
  workdir = output / run.folder
  if (record := read_record(workdir)) is None:
    return None
  settings = {"config": study.config, "fields": _plain(study.fields_of(run.variant))}
  if changed := [name for name, now in settings.items() if record[name] != now]:
    raise RunError(f"{workdir} was made with other {' and '.join(changed)}: remove it, or use another --output")
  return record


def _write_record(study: Study, run: Run, workdir: pathlib.Path, fields: Mapping[str, Any], costs: Costs) -> None:
  record = {
    "study": study.name,
    "variant": run.variant,
    "seed": run.seed,
    "config": study.config,
    "fields": _plain(fields),
    "commit": _commit(),
    **costs._asdict(),
  }
  temporary = workdir / f"{RECORD}.tmp"
  temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
  os.replace(temporary, workdir / RECORD)


def _arguments(study: Study, workdir: pathlib.Path, seed: int, fields: Mapping[str, Any]) -> Iterator[str]:
  yield from (f"--config={study.config}", f"--workdir={workdir}", f"--seed={seed}")
  yield from (f"--config.{path}={value}" for path, value in fields.items())


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
  """The fields as JSON gives them back."""
  return json.loads(json.dumps(dict(fields)))


def _commit() -> str:
  """The commit of the code, and "+" if it was changed; empty outside of a checkout."""
  here = pathlib.Path(__file__).parent
  git = lambda *words: subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False)
  head = git("rev-parse", "HEAD")
  if head.returncode:
    return ""
  return head.stdout.strip() + ("+" if git("status", "--porcelain", "--untracked-files=no").stdout.strip() else "")
