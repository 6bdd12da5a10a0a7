"""A run whose folder is in a bucket: checkpoints go there by themselves, the small files through a mirror."""

from __future__ import annotations

import pathlib
import time

import jax
import numpy as np
import pytest
from absl import logging
from toys import bucket_toy, killed_run
from toys.runs import assert_identical, interrupted_after

from launch import _flags
from sao_jax.checkpoints.checkpointer import Checkpointer, load_params
from sao_jax.configuration.paths import expand
from sao_jax.configuration.run_record import read_config
from sao_jax.errors import ConfigError
from sao_jax.learner import placement
from sao_jax.mirror import mirror_folder, mirrored
from sao_jax.report.metrics import MetricsWriter, read_metrics
from sao_jax.report.page import read_episodes
from sao_jax.training import loop, phases

STEPS = 2
TIMES = ("seconds", "rollouts_", "run_", "event_loop", "_per_second")


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
  """The bucket's content."""
  objects, variables = bucket_toy.of_this_process()
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for name, value in variables.items():
      patch.setenv(name, value)
    yield objects


@pytest.fixture
def said(monkeypatch):
  lines, warn = [], logging.warning

  def warning(message, *arguments, **options):
    lines.append(message % arguments)
    warn(message, *arguments, **options)

  monkeypatch.setattr(logging, "warning", warning)
  return lines


def trained(lines):
  """What does not depend on the machine."""
  return [
    [line.get(name) for name in ("step", "phase", "policy_loss", "critic_grad_norm", "reward_mean")] for line in lines
  ]


def test_a_run_in_a_bucket_is_the_run_on_a_disk(tmp_path, monkeypatch, objects):
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
  config = killed_run.get_config(STEPS, latency_seed=1)
  expected = loop.train(config, tmp_path / "disk")

  # Interrupted, and gone on with elsewhere: what the first process has kept on its disk is lost.
  workdir = "gs://bucket/runs/a"
  with interrupted_after(1):
    assert loop.train(config, workdir).interrupted
  first = mirror_folder(expand(workdir))
  (first / "metrics.jsonl").write_text("of another machine")
  resumed = loop.train(config, workdir)
  assert resumed.step == expected.step
  assert_identical(resumed.state, expected.state)

  # The folder holds the same, read through its address; nothing of it is in the current folder.
  assert trained(read_metrics(workdir)) == trained(read_metrics(tmp_path / "disk"))
  assert read_episodes(workdir) == read_episodes(tmp_path / "disk")
  assert read_config(expand(workdir)) == read_config(tmp_path / "disk")
  assert phases.latest_step(expand(workdir) / "train") == resumed.step
  assert any(name.startswith("runs/a/consumed/train/00000001") for name in objects)
  assert "runs/a/lock" not in objects and not pathlib.Path("gs:").exists()

  # Parameters for another run.
  assert_identical(load_params(f"{workdir}/train"), expected.state.policy.params)


def test_what_belongs_to_a_checkpoint_is_stored_before_it_is_complete(objects):
  state, order = {"params": {"w": jax.numpy.arange(3.0)}}, []

  def store():
    order.append([name for name in objects if name.startswith("runs/b/")])

  with Checkpointer("gs://bucket/runs/b", before=store) as checkpointer:
    checkpointer.save(1, state, {"prompts": np.arange(3)})
  assert order == [[]] and "runs/b/1/commit_success.txt" in objects


def test_an_abandoned_future_and_an_unfinished_checkpoint_in_a_bucket_are_passed_over(objects):
  state = {"params": {"w": jax.numpy.arange(3.0)}}
  with Checkpointer("gs://bucket/runs/c", every=1) as checkpointer:
    for step in (1, 3):
      checkpointer.save(step, state, step)
  objects.put("runs/c/2/policy/part", b"of a process that was killed")
  with Checkpointer("gs://bucket/runs/c", every=1) as checkpointer:
    assert checkpointer.latest_step() == 3
    assert checkpointer.restore(jax.eval_shape(lambda: state), step=1).host_state == 1
    checkpointer.save(2, state, 2)
    checkpointer.wait()
    assert checkpointer.latest_step() == 2
    assert checkpointer.restore(jax.eval_shape(lambda: state)).host_state == 2
  assert "runs/c/abandoned/3/commit_success.txt" in objects
  assert not any(name.startswith("runs/c/3/") for name in objects)
  assert "runs/c/2/policy/part" not in objects


def test_a_mirror_stores_what_has_changed_and_removes_what_is_gone(tmp_path, objects):
  objects.put("runs/d/metrics.jsonl", b"one\n")
  objects.put("runs/d/train/1/policy/big", b"a checkpoint")
  (tmp_path / "stale").write_text("of an earlier process")
  with mirrored(expand("gs://bucket/runs/d"), tmp_path) as mirror:
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    before = objects["runs/d/metrics.jsonl"]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a.png").write_bytes(b"a")
    (tmp_path / "half.tmp").write_bytes(b"h")
    mirror.store()
    assert objects["runs/d/new/a.png"][1] == b"a" and objects["runs/d/metrics.jsonl"] == before
    with (tmp_path / "metrics.jsonl").open("a") as file:
      file.write("two\n")
    (tmp_path / "new" / "a.png").unlink()
  assert objects["runs/d/metrics.jsonl"][1] == b"one\ntwo\n"
  assert {name for name in objects if name.startswith("runs/d")} == {
    "runs/d/metrics.jsonl",
    "runs/d/train/1/policy/big",
  }


def test_lines_are_stored_now_and_then_too(tmp_path, objects):
  with (
    mirrored(expand("gs://bucket/runs/e"), tmp_path, every=0.01),
    MetricsWriter(tmp_path) as writer,
  ):
    writer.write(1, {"reward_mean": 0.5})
    while "runs/e/metrics.jsonl" not in objects:
      time.sleep(0.01)
  assert read_metrics("gs://bucket/runs/e") == [{"step": 1, "phase": "train", "reward_mean": 0.5}]


def test_a_folder_on_a_disk_is_its_own_mirror(tmp_path):
  assert mirror_folder(tmp_path) == tmp_path
  (tmp_path / "a").write_text("a")
  with mirrored(tmp_path, tmp_path) as mirror:
    mirror.store()
  assert (tmp_path / "a").read_text() == "a"


def test_addresses_stay_as_they_are_and_need_gcsfs(monkeypatch, objects):
  assert str(expand("gs://bucket/runs/a") / "train") == "gs://bucket/runs/a/train"
  assert mirror_folder(expand("gs://bucket/a")) == mirror_folder(expand("gs://bucket/a/"))
  assert mirror_folder(expand("gs://bucket/a")) != mirror_folder(expand("gs://bucket/b"))
  assert mirror_folder(expand("gs://bucket/a"), 0) != mirror_folder(expand("gs://bucket/a"), 1)
  _flags.check_writable("gs://bucket/runs/new")
  assert not any(name.startswith("runs/new") for name in objects)
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(ConfigError, match=r"(?s)--workdir: gs://bucket/a is in a bucket.*pip install"):
    _flags.check_writable("gs://bucket/a")
