"""Runs the faulty toy for some minutes, does to it what machines and people do, and says what held.

    launch/soak.sh [SECONDS]

Outages, a second process in the same folder, viewers beside the run, kill -9, every signal that asks a run to stop, and
a disk that takes no further byte, again and again in a random order. After each of them the run must go on, or have
ended with the documented status and sentence; started again it goes on from its newest checkpoint. In the end all its
lines of metrics are read: no step is missing or twice, and in each line every rollout has one place or outcome.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from absl import logging
from toys import processes
from toys.paths import REPOSITORY, TESTS

from launch._flags import EXIT_BAD_INPUT, EXIT_RESUMABLE
from sao_jax.report.metrics import valid_lines
from sao_jax.rollout.outcomes import Outcome, Place, check_identity
from soak import faulty

PATIENCE = 240.0  # seconds for a start or a step, on a busy machine


@dataclasses.dataclass
class Soak:
  """One run and what happens to it.

  Attributes:
    workdir: the run's folder.
    outage: the file that means an outage while it exists.
    outage_seconds: length of an outage.
    process: the training process, while there is one.
    log: its last lines.
    events: how often everything has happened.
  """

  workdir: pathlib.Path
  outage: pathlib.Path
  outage_seconds: float
  flags: tuple[str, ...] = ()
  process: subprocess.Popen | None = None
  log: collections.deque[str] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=400))
  events: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

  def command(self, program: str, *more: str) -> list[str]:
    """The command line of one of the project's programs, on this run."""
    config = str(TESTS / "soak" / "faulty.py")
    return [sys.executable, "-m", f"launch.{program}", f"--config={config}", f"--workdir={self.workdir}", *more]

  def environment(self) -> dict[str, str]:
    """The environment variables of the programs."""
    path = os.pathsep.join([str(REPOSITORY), str(TESTS), processes.NO_TORCH])
    return processes.environment(PYTHONPATH=path, **{faulty.OUTAGE: self.outage})

  def start(self) -> None:
    """Starts training, and waits for its next step."""
    before = self.last_step()
    self.log.clear()
    self.process = subprocess.Popen(
      self.command("train", *self.flags),
      cwd=REPOSITORY,
      env=self.environment(),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      errors="replace",
    )
    threading.Thread(target=self._drain, args=(self.process,), daemon=True).start()
    self.wait_for_step(before, "a start")

  def end(self, wanted: set[int], what: str) -> None:
    """Waits for the end of training, with one of the exit statuses that are wanted."""
    status = self.process.wait(PATIENCE)
    self.check(status in wanted, f"{what}: exit status {status}, not one of {sorted(wanted)}")

  def run(self, program: str, *more: str) -> subprocess.CompletedProcess:
    """Runs another program to its end."""
    return subprocess.run(
      self.command(program, *more),
      cwd=REPOSITORY,
      env=self.environment(),
      capture_output=True,
      text=True,
      timeout=PATIENCE,
      check=False,
    )

  def last_step(self) -> int:
    """The newest step in the metrics; 0 before the first one."""
    lines = (line["step"] for line in valid_lines(self.workdir / "metrics.jsonl") if line.get("phase") == "train")
    return max(lines, default=0)

  def wait_for_step(self, before: int, what: str, more: int = 1) -> None:
    """Waits until training has made `more` further steps."""
    ends = time.monotonic() + PATIENCE
    # A resumed run first drops the lines behind its checkpoint, so any growth of the file's last step will do.
    seen = before
    while time.monotonic() < ends:
      status = self.process.poll()
      self.check(status is None, f"{what}: training has ended with status {status}")
      now = self.last_step()
      seen = min(seen, now)
      if now >= seen + more:
        return
      time.sleep(0.2)
    self.check(False, f"{what}: no step within {PATIENCE:.0f} s")

  def check(self, holds: bool, problem: str) -> None:
    """Fails with the run's last lines."""
    if not holds:
      raise SystemExit("".join(self.log) + f"\nsoak: {problem}\nsoak: so far {dict(self.events)}")

  def _drain(self, process: subprocess.Popen) -> None:
    for line in process.stderr:
      self.log.append(line)


# What happens to the run. Each event leaves it training.


def outage(soak: Soak) -> None:
  """The server behind the environment is down for a while; the run goes on afterwards."""
  soak.outage.touch()
  time.sleep(soak.outage_seconds)
  soak.outage.unlink()
  soak.wait_for_step(soak.last_step(), "after an outage", more=2)


def second_process(soak: Soak) -> None:
  """Somebody starts the same command again: refused, and nothing of the run is changed."""
  config = (soak.workdir / "config.json").read_bytes()
  second = soak.run("train", *soak.flags)
  soak.check(
    second.returncode == EXIT_BAD_INPUT and "--workdir" in second.stderr,
    f"a second process ended with status {second.returncode}: {second.stderr[-2000:]}",
  )
  soak.check((soak.workdir / "config.json").read_bytes() == config, "a second process changed config.json")
  soak.wait_for_step(soak.last_step(), "after a second process")


def viewers(soak: Soak) -> None:
  """Evaluation and report beside the run."""
  for program in ("evaluate", "report"):
    done = soak.run(program)
    soak.check(done.returncode == 0, f"launch.{program} beside the run: {done.stderr[-2000:]}")
  soak.wait_for_step(soak.last_step(), "after viewers")


def kill(soak: Soak) -> None:
  """kill -9, and a start."""
  soak.process.kill()
  soak.process.wait()
  soak.start()


def stopped_by(number: signal.Signals) -> Callable[[Soak], None]:
  """Makes the event of one signal: saved, its own exit status, and a start."""

  def stop(soak: Soak) -> None:
    soak.process.send_signal(number)
    soak.end({EXIT_RESUMABLE}, number.name)
    soak.start()

  stop.__name__ = number.name
  return stop


def full_disk(soak: Soak) -> None:
  """No file can grow: the run says so and ends, or goes on until there is room again."""
  limit = resource.prlimit(soak.process.pid, resource.RLIMIT_FSIZE)
  resource.prlimit(soak.process.pid, resource.RLIMIT_FSIZE, (0, limit[1]))
  with contextlib.suppress(subprocess.TimeoutExpired):
    soak.process.wait(30.0)
  if soak.process.poll() is None:
    resource.prlimit(soak.process.pid, resource.RLIMIT_FSIZE, limit)
    soak.wait_for_step(soak.last_step(), "after a full disk")
    return
  text = "".join(soak.log)
  last = "".join(list(soak.log)[-3:])
  ends = all(words in last for words in ("error:", "the last good checkpoint is that of step", "Make room"))
  soak.check(ends, "a full disk ended the run without the reason and the remedy")
  soak.check("saved: step" not in text.rpartition("File too large")[2], "a save was promised that did not happen")
  soak.events["full_disk_ended_the_run"] += 1
  soak.start()


EVENTS = (
  outage,
  second_process,
  viewers,
  kill,
  stopped_by(signal.SIGTERM),
  stopped_by(signal.SIGINT),
  stopped_by(signal.SIGHUP),
  stopped_by(signal.SIGUSR1),
  full_disk,
)


def happenings(seed: int) -> Iterator[Callable[[Soak], None]]:
  """All events in a random order, again and again."""
  rng = random.Random(seed)
  for _ in itertools.count():
    yield from rng.sample(EVENTS, len(EVENTS))


def read_lines(soak: Soak) -> dict:
  """Checks all lines of metrics; returns the counters of the last one."""
  lines = [line for line in valid_lines(soak.workdir / "metrics.jsonl") if line.get("phase") == "train"]
  steps = [line["step"] for line in lines if "rollouts_submitted" in line]
  soak.check(steps == list(range(1, len(steps) + 1)), f"steps are missing or twice: {steps}")

  names = ("submitted", *(part.value for part in (*Place, *Outcome)))
  for line in lines:
    if "rollouts_submitted" in line:
      check_identity({name: line[f"rollouts_{name}"] for name in names})
  last = next(line for line in reversed(lines) if "rollouts_submitted" in line)
  return {"step": last["step"]} | {name: value for name, value in last.items() if name.startswith("rollouts_")}


def soak(
  seconds: float,
  workdir: pathlib.Path,
  events: Iterable[Callable[[Soak], None]],
  *,
  outage_seconds: float,
  flags: Sequence[str] = (),
) -> dict:
  """Runs for about so many seconds, or to the end of the events; returns what happened, and the last counters."""
  # A shell ignores some signals for what it runs in the background, and programs would inherit that.
  for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
      signal.signal(number, signal.SIG_DFL)

  run = Soak(workdir, workdir.with_name(workdir.name + ".outage"), outage_seconds, tuple(flags))
  ends = time.monotonic() + seconds
  try:
    run.start()
    for event in events:
      if time.monotonic() >= ends:
        break
      logging.info("step %d, %.0f s left: %s", run.last_step(), ends - time.monotonic(), event.__name__)
      event(run)
      run.events[event.__name__] += 1
    run.process.send_signal(signal.SIGTERM)
    run.end({EXIT_RESUMABLE}, "the end")
    evaluated = run.run("evaluate")
    run.check(evaluated.returncode == 0, f"the last checkpoint cannot be evaluated: {evaluated.stderr[-2000:]}")
  finally:
    if run.process is not None and run.process.poll() is None:
      run.process.kill()
  return {"events": dict(run.events)} | read_lines(run)


def main() -> None:
  """Parses the command line, runs, and prints the result as JSON."""
  logging.use_absl_handler()
  logging.set_verbosity(logging.INFO)
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("seconds", type=float, nargs="?", default=1200.0)
  parser.add_argument("--workdir", type=pathlib.Path)
  parser.add_argument("--outage_seconds", type=float, default=60.0)
  parser.add_argument("--seed", type=int, default=0)
  given, flags = parser.parse_known_args()
  workdir = given.workdir or pathlib.Path(tempfile.mkdtemp(prefix="soak_")) / "run"
  result = soak(given.seconds, workdir, happenings(given.seed), outage_seconds=given.outage_seconds, flags=flags)
  sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
  main()
