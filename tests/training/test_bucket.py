"""A run whose folder is in a bucket: checkpoints go there by themselves, the small files through a mirror."""

from __future__ import annotations

import pathlib
import signal
import time

import jax
import numpy as np
import pytest
from toys import bucket_toy, training_toy
from toys.runs import assert_identical

from launch import _flags
from sao_jax import bucket_lock
from sao_jax.checkpoints.checkpointer import Checkpointer, load_params
from sao_jax.configuration.paths import expand
from sao_jax.configuration.run_record import read_config
from sao_jax.errors import ConfigError
from sao_jax.learner import placement
from sao_jax.mirror import mirror_folder, mirrored
from sao_jax.report.metrics import MetricsWriter, read_metrics
from sao_jax.training import phases, sft
from sao_jax.training.run_folder import open_run


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
  """The bucket's content."""
  objects, variables = bucket_toy.of_this_process()
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for name, value in variables.items():
      patch.setenv(name, value)
    yield objects


def test_a_run_in_a_bucket_is_the_run_on_a_disk(tmp_path, monkeypatch, objects):
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
  config = training_toy.replace(training_toy.get_config(), sft={"steps": 3})
  expected, workdir = sft.sft(config, tmp_path / "disk"), "gs://bucket/runs/a"
  pack, packed = sft.agreed_batch, []

  def pack_and_interrupt(learner, trajectories, look):
    packed.append(trajectories)
    if len(packed) == 2:
      assert "runs/a/lock" in objects
      signal.raise_signal(signal.SIGINT)
    return pack(learner, trajectories, look)

  # Interrupted, and gone on with elsewhere: what the first process has kept on its disk is lost.
  with monkeypatch.context() as patch:
    patch.setattr(sft, "agreed_batch", pack_and_interrupt)
    sft.sft(config, workdir)
  assert phases.latest_step(expand(workdir) / "sft") == 2
  first = mirror_folder(expand(workdir))
  (first / "metrics.jsonl").write_text("of another machine")
  assert_identical(sft.sft(config, workdir), expected)

  # The folder holds the same, read through its address; nothing of it is in the current folder.
  same = ("step", "phase", "sft_loss", "policy_grad_norm", "num_tokens")
  trained = lambda workdir: [[line.get(name) for name in same] for line in read_metrics(workdir, "sft")]
  assert trained(workdir) == trained(tmp_path / "disk") and len(trained(workdir)) == 3
  assert read_config(expand(workdir)) == read_config(tmp_path / "disk")
  assert phases.latest_step(expand(workdir) / "sft") == 3
  assert "runs/a/lock" not in objects and not pathlib.Path("gs:").exists()
  assert_identical(load_params(f"{workdir}/sft"), expected)


def test_a_run_that_another_machine_holds_is_refused_and_one_killed_here_is_not(tmp_path, monkeypatch, objects):
  config = training_toy.replace(training_toy.get_config(), training={"lock_seconds": 0.0})
  workdir = expand("gs://bucket/runs/held")
  monkeypatch.setattr(bucket_lock, "EXPIRY", 0.5)
  monkeypatch.setattr(bucket_lock, "POLL", 0.05)
  monkeypatch.setattr(bucket_lock, "RENEW", 0.1)
  with bucket_lock.bucket_lock(workdir, {"pid": 7, "host": "b", "since": "now", "command": "train"}, patience=0.0):
    with pytest.raises(ConfigError, match=r"another run \(pid 7 on b"), open_run(config, workdir):
      pass
    assert {name for name in objects if name.startswith("runs/held")} == {"runs/held/lock"}
  assert "runs/held/lock" not in objects

  # Killed: neither the object nor the file of this machine was removed.
  with open_run(config, workdir):
    left = objects["runs/held/lock"][1]
    file = (mirror_folder(workdir) / "lock").read_text()
  objects.put("runs/held/lock", left)
  (mirror_folder(workdir) / "lock").write_text(file)
  monkeypatch.setattr(bucket_lock, "EXPIRY", 600.0)
  monkeypatch.setattr(bucket_lock, "RENEW", 600.0)  # only `store` looks at the lock, not the thread beside it
  with open_run(config, workdir) as run:
    run.store()
    own = objects["runs/held/lock"][1]

    # Somebody else has taken it meanwhile: nothing more is stored.
    objects.put("runs/held/lock", own.replace(b'"holder": {', b'"holder": {"other": 1, '))
    (run.files / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(bucket_lock.LockLost):
      run.store()
    (run.files / "metrics.jsonl").unlink()
    objects.put("runs/held/lock", own)
  assert not any("metrics" in name for name in objects if name.startswith("runs/held"))


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
