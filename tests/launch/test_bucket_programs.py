"""The launchers on a run in a bucket, as a user starts them: nothing of it is on a disk but a copy of small files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from toys import bucket_toy, processes
from toys.paths import REPOSITORY

WORKDIR = "gs://bucket/runs/a"
CONFIG = ("--config=tests/toys/training_toy.py", f"--workdir={WORKDIR}")
SMALL = ("--config.algorithm.critic_warmup_steps=0", "--config.training.audit=False")


@pytest.mark.timeout(600)
def test_a_run_is_trained_evaluated_reported_and_exported(tmp_path):
  with bucket_toy.served() as (objects, variables):
    environment = processes.environment(PYTHONPATH=processes.NO_TORCH, XDG_CACHE_HOME=tmp_path, **variables)

    def run(program, *flags):
      command = [sys.executable, "-m", f"launch.{program}", *flags]
      options = {"cwd": REPOSITORY, "env": environment, "text": True, "timeout": 300}
      done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
      assert done.returncode == 0, (program, done.stdout)
      return done.stdout

    output = run("train", *CONFIG, *SMALL, "--config.training.steps=1", "--config.rollout.record=True")
    assert "metrics.jsonl" in {name.removeprefix("runs/a/") for name in objects} and "runs/a/lock" not in objects
    assert (
      "runs/a/train/1/commit_success.txt" in objects and "runs/a/consumed/train/00000001.process_0.npz" in objects
    ), output
    assert "AdaptiveReadahead" not in output  # what gcsfs says of its caches
    lines = objects["runs/a/metrics.jsonl"][1].decode().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]

    run("evaluate", *CONFIG, *SMALL)
    assert json.loads(objects["runs/a/evaluation_train.json"][1])["heldout_trials"] == 6
    run("report", f"--workdir={WORKDIR}")
    assert b"<html" in objects["runs/a/report/index.html"][1]
    run("convert_hf", f"--checkpoint={WORKDIR}/train", "--output=gs://bucket/hf/a")
    assert json.loads(objects["hf/a/config.json"][1])["model_type"] == "qwen3_moe"
