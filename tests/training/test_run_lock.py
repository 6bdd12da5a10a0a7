"""One writer per run: the second waits, is then refused, and changes nothing; death of any kind gives way."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest
from absl import logging
from toys import processes, training_toy
from toys.paths import REPOSITORY

from sao_jax import run_lock as lock
from sao_jax.errors import ConfigError
from sao_jax.run_lock import run_lock
from sao_jax.training import loop, sft


@pytest.fixture
def said(monkeypatch):
  lines = []
  for level in ("info", "warning"):
    monkeypatch.setattr(logging, level, lambda message, *arguments: lines.append(message % arguments))
  return lines


class Time:
  """Passes only when somebody sleeps."""

  def __init__(self):
    self.now, self.wakes = 0.0, {}

  def sleep(self, seconds):
    self.now += seconds
    if self.now in self.wakes:
      self.wakes.pop(self.now)()

  def options(self, patience=60.0):
    return {"patience": patience, "clock": lambda: self.now, "sleep": self.sleep}


def test_the_second_waits_names_the_first_and_is_refused(tmp_path, said):
  time = Time()
  with run_lock(tmp_path / "run", **time.options()):
    named = rf"--workdir: another run \(pid {os.getpid()} on .*, since 2.*: .*"
    with pytest.raises(ConfigError, match=named) as error, run_lock(tmp_path / "run", **time.options()):
      pytest.fail("two runs in one folder")
    assert time.now == 60.0 and "training.lock_seconds" in error.value.remedy
    assert len(said) == 1 and said[0].startswith("Waiting up to 60 s: another run (pid")
  with run_lock(tmp_path / "run", **time.options()):
    assert time.now == 60.0
  assert [path.name for path in (tmp_path / "run").iterdir()] == [lock.LOCK_FILE]


def test_it_goes_on_once_the_first_has_ended(tmp_path, said):
  time, first = Time(), contextlib.ExitStack()
  first.enter_context(run_lock(tmp_path, **time.options()))
  time.wakes[3.0] = first.close
  with run_lock(tmp_path, **time.options()):
    assert time.now == 3.0
    assert json.loads((tmp_path / lock.LOCK_FILE).read_text())["pid"] == os.getpid()


def test_an_error_releases_it_and_a_torn_name_is_no_obstacle(tmp_path):
  with pytest.raises(RuntimeError), run_lock(tmp_path, patience=0.0):
    raise RuntimeError
  (tmp_path / lock.LOCK_FILE).write_text('{"pid": 3')
  assert lock.describe_holder(tmp_path) == "another run"
  with run_lock(tmp_path, patience=0.0), run_lock(tmp_path, patience=0.0, first_process=False):
    pass


def test_where_there_are_no_locks_it_says_so_and_goes_on(tmp_path, said, monkeypatch):
  def flock(file, operation):
    raise OSError(95, "Operation not supported")

  monkeypatch.setattr(fcntl, "flock", flock)
  with run_lock(tmp_path, patience=0.0):
    assert len(said) == 1 and "knows no locks (Operation not supported)" in said[0]


PARENT = """
import os, pathlib, subprocess, sys, time
from sao_jax.run_lock import run_lock
with run_lock(pathlib.Path(sys.argv[1]), patience=0.0):
  copy = os.fork()  # as multiprocessing makes its workers
  if copy == 0:
    time.sleep(600)
  program = subprocess.Popen(["sleep", "600"])
  print(copy, program.pid, flush=True)
  time.sleep(600)
"""


def test_a_kill_releases_it_although_children_live_on(tmp_path):
  parent = subprocess.Popen(
    [sys.executable, "-c", PARENT, str(tmp_path)],
    stdout=subprocess.PIPE, text=True, env=processes.environment(PYTHONPATH=REPOSITORY),
  )  # fmt: skip
  children = [int(pid) for pid in parent.stdout.readline().split()]
  try:
    with pytest.raises(ConfigError, match=f"pid {parent.pid} on"), run_lock(tmp_path, patience=0.0):
      pass
    parent.kill()
    parent.wait(60)
    for child in children:
      os.kill(child, 0)  # it lives
    with run_lock(tmp_path, patience=0.0):
      pass
  finally:
    for child in children:
      os.kill(child, signal.SIGKILL)
    parent.stdout.close()


@pytest.mark.parametrize("program", [loop.train, loop.pretrain_value, sft.sft])
def test_every_program_that_writes_is_refused_before_it_changes_anything(tmp_path, program):
  config = training_toy.replace(training_toy.get_config(), training={"lock_seconds": 0.0})
  with run_lock(tmp_path, patience=0.0):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "train"}\n')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="another run"):
      program(config, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("program", [loop.train, sft.sft])
def test_a_folder_that_could_not_be_read_again_is_refused_before_work(tmp_path, program):
  with pytest.raises(ConfigError, match=r"lr\[1e-4\]/run has \[ in it"):
    program(training_toy.get_config(), tmp_path / "lr[1e-4]" / "run")
  assert list(tmp_path.iterdir()) == []
