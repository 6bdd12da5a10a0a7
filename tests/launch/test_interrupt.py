"""Ctrl-C before a program has begun its work: one line, status 130, and nothing half-written."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from toys import processes
from toys.paths import REPOSITORY, TESTS

DEADLINE = 120.0  # seconds; only a hang takes as long

SLOW_IMPORT = """
import pathlib, time
pathlib.Path("mark").touch()
time.sleep(600)
"""

SLOW_RESET = """
from __future__ import annotations
import asyncio, dataclasses, pathlib
from toys import training_toy

class Episode(training_toy.ParityEpisode):
  async def reset(self, prompt):
    pathlib.Path("mark").touch()
    await asyncio.sleep(600)

@dataclasses.dataclass(frozen=True)
class Slow(training_toy.Parity):
  make = staticmethod(lambda tokenizer: Episode())

def get_config():
  return dataclasses.replace(training_toy.get_config(), environment=Slow())
"""


def start(folder, program, *flags, on_interrupt=signal.SIG_DFL):
  """A program in `folder` that has made the file `mark`; what starts the tests may have had SIGINT ignored."""
  environment = processes.environment(PYTHONPATH=f"{REPOSITORY}:{TESTS}")
  command = [sys.executable, "-m", f"launch.{program}", *flags]
  # Set by a process in between: what `preexec_fn` runs in a copy of this one, with its many threads, may never return.
  between = f"import os, signal, sys; signal.signal(signal.SIGINT, signal.{on_interrupt.name}); "
  between += "os.execv(sys.argv[1], sys.argv[1:])"
  with (folder / "log").open("wb") as log:  # not a pipe, which would fill up
    process = subprocess.Popen(
      [sys.executable, "-c", between, *command], cwd=folder, env=environment, stdout=log, stderr=log
    )
  began = time.monotonic()
  while not (folder / "mark").exists():
    assert process.poll() is None, (folder / "log").read_text()
    assert time.monotonic() - began < DEADLINE
    time.sleep(0.01)
  return process


def interrupt(folder, program, *flags):
  """Sends SIGINT to a program at its mark; returns its status and output."""
  process = start(folder, program, *flags)
  try:
    process.send_signal(signal.SIGINT)
    return process.wait(DEADLINE), (folder / "log").read_text()
  finally:
    process.kill()


@pytest.mark.parametrize("program", ["train", "convert_hf"])
def test_during_the_imports(tmp_path, program):
  (tmp_path / "absl.py").write_text(SLOW_IMPORT)  # found before the real one
  assert interrupt(tmp_path, program, "--workdir=run") == (130, "Interrupted.\n")
  assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"absl.py", "log", "mark"}


def test_while_prompts_are_checked(tmp_path):
  (tmp_path / "slow.py").write_text(SLOW_RESET)
  status, output = interrupt(tmp_path, "train", "--config=slow.py", "--workdir=run")
  assert status == 130 and output.endswith("Interrupted.\n") and "Traceback" not in output
  assert list((tmp_path / "run").iterdir()) == []  # the run has not begun


def test_a_shell_that_has_it_ignored_is_obeyed(tmp_path):
  """As scripts have for what they run in the background: Ctrl-C is meant for something else."""
  (tmp_path / "absl.py").write_text(SLOW_IMPORT)
  process = start(tmp_path, "convert_hf", on_interrupt=signal.SIG_IGN)
  try:
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
      process.wait(0.5)
  finally:
    process.kill()
    process.wait(DEADLINE)
