"""Metrics: one line per step, nothing doubled after a resume, nothing lost to a kill, never a wait for the device."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from absl import logging

from sao_jax.report import metrics as metrics_module
from sao_jax.report.metrics import DelayedFetch, MetricsWriter, read_metrics
from sao_jax.report.progress import Progress


def steps(workdir, phase=None):
  return [line["step"] for line in read_metrics(workdir, phase)]


def test_every_kind_of_value(tmp_path):
  with MetricsWriter(tmp_path) as writer:
    writer.write(
      np.int64(3),
      {
        "loss": jnp.float32(0.5),
        "undefined": math.nan,
        "infinite": np.float32(np.inf),
        "lags": np.array([1, 2, 3], np.int32),
        "shares": jnp.array([0.5, jnp.nan], jnp.float32),
        "count": 7,
        "flag": np.bool_(True),
        "status": "warm-up",
        "nothing": None,
        "nested": {"a": [1, (2.0, math.nan)]},
      },
    )
  (text,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert "NaN" not in text and "Infinity" not in text
  assert json.loads(text) == {
    "step": 3,
    "phase": "train",
    "loss": 0.5,
    "undefined": None,
    "infinite": None,
    "lags": [1, 2, 3],
    "shares": [0.5, None],
    "count": 7,
    "flag": True,
    "status": "warm-up",
    "nothing": None,
    "nested": {"a": [1, [2.0, None]]},
  }


def test_a_resume_drops_the_steps_that_will_be_repeated(tmp_path):
  with MetricsWriter(tmp_path, "sft") as writer:
    for step in (1, 2, 3, 4, 5):
      writer.write(step, {"loss": 1.0})
  with MetricsWriter(tmp_path) as writer:
    for step in (1, 2, 3, 4, 5):
      writer.write(step, {"reward_mean": 0.0})
  with MetricsWriter(tmp_path, restored_step=3) as writer:
    assert steps(tmp_path, "train") == [1, 2, 3]
    writer.write(4, {"reward_mean": 1.0})
  assert steps(tmp_path, "train") == [1, 2, 3, 4] and steps(tmp_path, "sft") == [1, 2, 3, 4, 5]
  assert read_metrics(tmp_path, "train")[-1]["reward_mean"] == 1.0
  with MetricsWriter(tmp_path):  # a fresh start of the phase
    assert steps(tmp_path, "train") == [] and steps(tmp_path, "sft") == [1, 2, 3, 4, 5]


def test_a_line_cut_short_is_skipped_and_not_continued(tmp_path):
  with MetricsWriter(tmp_path) as writer:
    writer.write(1, {})
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 2, "phase": "tr')
  assert steps(tmp_path) == [1]
  with MetricsWriter(tmp_path, restored_step=1) as writer:
    writer.write(2, {})
  assert steps(tmp_path) == [1, 2]
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_numbers_that_are_no_json_are_read_as_undefined_and_written_as_null(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "train", "lag_mean": NaN, "lag_max": -Infinity}\n')
  with MetricsWriter(tmp_path, restored_step=1):
    assert read_metrics(tmp_path) == [{"step": 1, "phase": "train", "lag_mean": None, "lag_max": None}]
  assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_kill_between_two_writes_loses_nothing(tmp_path):
  program = (
    "import os, signal, sys\n"
    "from sao_jax.report.metrics import MetricsWriter\n"
    "writer = MetricsWriter(sys.argv[1])\n"
    "[writer.write(step, {'x': 1.0}) for step in range(5)]\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n"
  )
  killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=os.getcwd(), timeout=120, check=False)
  assert killed.returncode == -signal.SIGKILL
  assert steps(tmp_path) == [0, 1, 2, 3, 4]


def test_a_rewrite_that_is_killed_leaves_the_old_file(tmp_path, monkeypatch):
  with MetricsWriter(tmp_path) as writer:
    writer.write(1, {})
    writer.write(2, {})

  def killed(*arguments):
    raise KeyboardInterrupt

  monkeypatch.setattr(metrics_module.os, "replace", killed)
  with pytest.raises(KeyboardInterrupt):
    MetricsWriter(tmp_path, restored_step=1)
  assert steps(tmp_path) == [1, 2]


def test_tensorboard_gets_the_scalars(tmp_path):
  pytest.importorskip("tensorboardX")
  with MetricsWriter(tmp_path, "sft") as writer:
    writer.write(1, {"loss": 0.25, "lags": [1, 2]})
  (events,) = (tmp_path / "tensorboard" / "sft").iterdir()
  content = events.read_bytes()
  assert b"loss" in content and b"lags" not in content


def test_without_tensorboard_the_log_says_so_and_the_file_is_written(tmp_path, monkeypatch):
  said = []
  monkeypatch.setitem(sys.modules, "tensorboardX", None)
  monkeypatch.setattr(logging, "log_first_n", lambda level, message, n: said.append(message))
  with MetricsWriter(tmp_path) as writer:
    writer.write(1, {"loss": 0.25})
  assert steps(tmp_path) == [1] and not (tmp_path / "tensorboard").exists()
  assert len(said) == 1 and "pip install -e '.[report]'" in said[0]


def test_metrics_are_fetched_one_step_late(monkeypatch):
  fetched = []
  device_get = jax.device_get
  monkeypatch.setattr(jax, "device_get", lambda tree: fetched.append(tree) or device_get(tree))
  delayed = DelayedFetch()
  assert delayed.flush() == []
  assert delayed.push(1, {"loss": jnp.float32(0.5)}) == [] and not fetched
  ((step, values),) = delayed.push(2, {"loss": jnp.float32(0.25)})
  assert step == 1 and values == {"loss": np.float32(0.5)} and isinstance(values["loss"], np.generic | np.ndarray)
  ((step, values),) = delayed.flush()
  assert step == 2 and values["loss"] == 0.25 and delayed.flush() == []


class Clock:
  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


@pytest.fixture
def said(monkeypatch):
  lines = []
  monkeypatch.setattr(logging, "info", lambda message, *arguments: lines.append(message % arguments))
  return lines


def test_progress_off_a_terminal_is_a_line_now_and_then(said):
  clock = Clock()
  console = rich.console.Console(file=io.StringIO(), force_terminal=False)
  with Progress("train", total=110, start=10, console=console, clock=clock, log_seconds=10) as progress:
    for step in range(11, 111):
      clock.now += 1.0
      progress.update(step, reward=0.5, lag=None, success=math.nan, buffer=np.float32(17))
  assert len(said) == 10
  assert said[0] == "train 20/110  1.00 steps/s  reward 0.5  buffer 17  0:01:30 left"
  assert said[-1].startswith("train 110/110") and said[-1].endswith("0:00:00 left")


def test_the_last_step_is_always_said(said):
  console = rich.console.Console(file=io.StringIO(), force_terminal=False)
  with Progress("sft", total=2, console=console, clock=Clock()) as progress:
    progress.update(1)
    assert not said
    progress.update(2)
  assert len(said) == 1


def test_progress_on_a_terminal_is_a_bar(said):
  clock, screen = Clock(), io.StringIO()
  console = rich.console.Console(file=screen, force_terminal=True, width=120)
  handler = logging.get_absl_handler().python_handler
  stream = handler.stream
  with Progress("train", total=4, console=console, clock=clock) as progress:
    clock.now += 2.0
    progress.update(4, reward=0.25, lag=1.5)
  assert "train" in screen.getvalue() and "4/4" in screen.getvalue()
  assert "2.00 steps/s  reward 0.25  lag 1.5" in screen.getvalue()
  assert not said and handler.stream is stream
