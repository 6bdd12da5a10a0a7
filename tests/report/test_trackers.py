"""Experiment trackers: the real packages without a network, and what happens when one fails."""

from __future__ import annotations

import json
import sqlite3
import struct
import time
import types

import pytest
from toys import training_toy

from sao_jax.configuration.relations import validate
from sao_jax.errors import ConfigError
from sao_jax.report import trackers
from sao_jax.report.metrics import MetricsWriter, read_metrics


def write(workdir, names, steps, restored_step=None):
  with MetricsWriter(workdir, "train", restored_step=restored_step, trackers=names, project="toys") as writer:
    for step in steps:
      writer.write(step, {"reward_mean": step / 8, "lag_histogram": [1, 2], "policy_loss": float("nan")})


def logged_records(data: bytes):
  """The records of a .wandb file: LevelDB's log format behind seven bytes, in blocks of 32 KiB."""
  position, parts = 7, b""
  while position + 7 <= len(data):
    left = 32768 - position % 32768
    length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
    if left < 7 or kind == 0:
      position += left
      continue
    parts += data[position + 7 : position + 7 + length]
    position += 7 + length
    if kind in (1, 4):  # whole, or the last part
      yield parts
      parts = b""


def test_wandb_keeps_a_run_offline_with_its_config_and_every_step(tmp_path, monkeypatch):
  pytest.importorskip("wandb")
  from wandb.proto import wandb_internal_pb2

  monkeypatch.setenv("WANDB_MODE", "offline")
  workdir = tmp_path / "my_run"
  workdir.mkdir()
  (workdir / "config.json").write_text(json.dumps({"name": "toy"}))
  write(workdir, ("wandb",), (1, 2, 3))
  time.sleep(1.1)  # wandb names the folders of a run by the second
  write(workdir, ("wandb",), (3, 4), restored_step=2)  # a resumed run repeats what its checkpoint did not have

  rewards, about = [], []
  for path in sorted(workdir.glob("wandb/offline-run-*/*.wandb")):
    for data in logged_records(path.read_bytes()):
      record = wandb_internal_pb2.Record()
      record.ParseFromString(data)
      if record.HasField("run"):
        about.append((record.run.project, record.run.run_group, record.run.display_name, record.run.run_id))
      if record.HasField("history"):
        line = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        rewards.append((line["step"], line["reward_mean"]))
        assert "policy_loss" not in line and "lag_histogram" not in line
  assert rewards == [(step, step / 8) for step in (1, 2, 3, 3, 4)]
  assert {entry[:3] for entry in about} == {("toys", "my_run", "my_run/train")} and len({e[3] for e in about}) == 1


def test_trackio_has_every_step_in_its_database(tmp_path, monkeypatch):
  trackio = pytest.importorskip("trackio")
  storage = pytest.importorskip("trackio.sqlite_storage")
  monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "db")
  (tmp_path / "db").mkdir()
  workdir = tmp_path / "my_run"
  workdir.mkdir()
  write(workdir, ("trackio",), (1, 2, 3))
  (database,) = (tmp_path / "db").glob("toys*.db")
  with sqlite3.connect(database) as connection:
    rows = connection.execute("select step, metrics from metrics order by step").fetchall()
  assert [(step, json.loads(metrics)["reward_mean"]) for step, metrics in rows] == [(1, 0.125), (2, 0.25), (3, 0.375)]
  assert trackio.__version__


class Broken:
  """A service that goes away after one step."""

  def __init__(self, *about):
    self.about, self.steps = about, []

  def log(self, scalars, step):
    if self.steps:
      raise ConnectionError("gone")
    self.steps.append(step)

  def finish(self):
    raise AssertionError("never called")


def test_a_tracker_that_fails_ends_no_run_and_is_said_once(tmp_path, monkeypatch, caplog):
  runs = []
  monkeypatch.setitem(trackers._RUNS, "wandb", lambda *about: runs.append(Broken(*about)) or runs[-1])
  write(tmp_path, ("wandb",), range(1, 6))
  assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
  assert len(runs) == 1 and runs[0].steps == [1]
  assert caplog.text.count("wandb gets no further metrics: ConnectionError('gone')") == 1

  def refuses(*about):
    raise PermissionError("no account")

  monkeypatch.setitem(trackers._RUNS, "trackio", refuses)
  write(tmp_path, ("trackio",), (1, 2))
  assert caplog.text.count("trackio gets no further metrics") == 1


def test_a_phase_that_begins_anew_is_another_run_there(tmp_path, monkeypatch):
  made = []
  fake = types.SimpleNamespace(log=lambda scalars, step: None, finish=lambda: None)
  monkeypatch.setitem(trackers._RUNS, "wandb", lambda workdir, phase, run_id, project: made.append(run_id) or fake)
  write(tmp_path, ("wandb",), (1, 2))
  write(tmp_path, ("wandb",), (3,), restored_step=2)
  write(tmp_path, ("wandb",), (1,))
  assert made[0] == made[1] != made[2]


def test_a_missing_package_is_named_before_any_work(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  config = training_toy.replace(training_toy.get_config(), training={"trackers": ("tensorboard", "wandb")})
  with pytest.raises(ConfigError, match=r"(?s)training.trackers: the package wandb is missing.*\.\[wandb\]"):
    validate(config, training=True)
  validate(config, training=False)
