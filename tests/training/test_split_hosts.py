"""Processes of which one learns and the other samples, on the loopback: phases, a replay, stops, other divisions."""

from __future__ import annotations

import re
import signal
import time

import jax
import pytest
from toys import processes, training_toy
from toys.paths import TESTS

from sao_jax.configuration import config_tree
from sao_jax.learner import placement
from sao_jax.report.metrics import read_metrics
from sao_jax.training.replay import replay

SCRIPT = str(TESTS / "toys" / "phases_run.py")
COMMON = {"rollout.record": True, "evaluation.every": 100, "value_pretraining.heldout_fraction": 0.3}
COMMON |= {"value_pretraining.demonstration_steps": 1, "value_pretraining.evaluate_every": 1}
SPLIT = {"rollout.placement": "split", "rollout.sampler_hosts": 1}
ENDLESS = {"training.steps": 100_000, "training.checkpoint_every": 100_000}


def start(workdir, folder, names, **fields):
  folder.mkdir()
  overrides = [f"{field}={value!r}" for field, value in (COMMON | fields).items()]
  return processes.start_joined(2, [SCRIPT, str(workdir), names, *overrides], folder, devices=1)


def stop_after(started, workdir, folder, step, process):
  """Asks one process to stop once there are so many steps; returns the step that all have saved."""
  deadline = time.monotonic() + 240
  while not (lines := read_metrics(workdir, "train")) or lines[-1]["step"] < step:
    if any(each.poll() is not None for each in started) or time.monotonic() > deadline:
      pytest.fail(f"no {step} steps: {processes.finish_joined(started, folder, timeout=0.1)}")
    time.sleep(0.1)
  started[process].send_signal(signal.SIGTERM)
  ended = processes.finish_joined(started, folder, timeout=200)
  assert [status for status, _ in ended] == [0, 0], ended
  saved = [re.findall(r"Interrupted and saved after step (\d+)", output) for _, output in ended]
  assert len(saved[0]) == 1 and saved[0] == saved[1], ended
  return int(saved[0][0])


@pytest.mark.timeout(900)
def test_one_process_learns_what_the_other_samples_and_both_go_on_otherwise_divided(tmp_path, monkeypatch):
  workdir, learner, sampler = tmp_path / "run", 0, 1
  folders = [tmp_path / name for name in ("split", "shared", "split_again")]

  # All phases; a signal to the one that learns.
  started = start(workdir, folders[0], "sft,value_pretraining,train", **SPLIT, **ENDLESS)
  first = stop_after(started, workdir, folders[0], 4, learner)
  losses = [line["sft_loss"] for line in read_metrics(workdir, "sft")]
  assert len(losses) == 3 and losses[2] < losses[0]
  course = read_metrics(workdir, "value_pretraining")
  assert [line["num_demonstrations"] for line in course if "num_demonstrations" in line] == [4, 0]
  trained = [line for line in read_metrics(workdir, "train") if "num_trajectories" in line]
  assert {line["num_trajectories"] for line in trained} == {4} and trained[-1]["turns_mean"] > 0

  # One process alone, with the same batches, has the same parameters, bit for bit.
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
  compared = replay(config_tree.replace(training_toy.get_config(), COMMON | ENDLESS), workdir)
  assert compared.identical and compared.steps == first, compared

  # Both learn and sample from here on; then one of them samples alone again, to the end.
  started = start(workdir, folders[1], "train", **ENDLESS)
  second = stop_after(started, workdir, folders[1], first + 2, sampler)
  steps = second + 3
  ended = processes.finish_joined(start(workdir, folders[2], "train", **SPLIT, **{"training.steps": steps}), folders[2])
  assert [status for status, _ in ended] == [0, 0], ended
  assert f"going on after step {second} " in ended[learner][1]

  # No rollout was lost or used twice; one process of them wrote.
  lines = [line for line in read_metrics(workdir, "train") if "num_trajectories" in line]
  assert [line["step"] for line in lines] == list(range(1, steps + 2))  # with the critic's warm-up
  assert all(line["rollouts_trained"] == 4 * (line["step"] - 1) for line in lines)
  assert [line["heldout_trials"] for line in read_metrics(workdir, "train") if "heldout_trials" in line] == [6, 6]
