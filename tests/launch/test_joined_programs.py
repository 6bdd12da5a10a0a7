"""Launchers over several processes on the loopback: stopped, killed, and run again with another number of them."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest
from toys import processes

from sao_jax.report.metrics import read_metrics

# Every process compiles for itself, and without experts sooner: those are in other tests of several processes.
CONFIG = ("--config=tests/toys/training_toy.py", "--config.model.num_experts=0", "--config.model.d_ff=16")


def start(program, count, workdir, folder, *flags):
  folder.mkdir()
  command = ["-m", f"launch.{program}", *CONFIG, f"--workdir={workdir}", *flags]
  return processes.start_joined(count, command, folder)


def wait_for_steps(started, workdir, folder, number):
  deadline = time.monotonic() + 240
  while not (steps := [line["step"] for line in read_metrics(workdir, "train")]) or steps[-1] < number:
    if any(process.poll() is not None for process in started) or time.monotonic() > deadline:
      pytest.fail(f"no {number} steps: {processes.finish_joined(started, folder, timeout=0.1)}")
    time.sleep(0.1)
  return steps[-1]


@pytest.mark.timeout(900)
def test_processes_stop_together_end_with_one_that_dies_and_go_on_as_fewer(tmp_path):
  workdir, long = tmp_path / "run", ("--config.training.steps=100000", "--config.training.checkpoint_every=5")

  # SIGTERM to one: all save the same step.
  started = start("train", 2, workdir, tmp_path / "first", *long)
  wait_for_steps(started, workdir, tmp_path / "first", 4)
  started[1].send_signal(signal.SIGTERM)
  ended = processes.finish_joined(started, tmp_path / "first", timeout=200)
  assert [status for status, _ in ended] == [75, 75], ended
  saved = [re.search(r"Interrupted and saved after step (\d+)", output) for _, output in ended]
  assert saved[0] and saved[1] and saved[0][1] == saved[1][1], ended
  first = int(saved[0][1])

  # SIGKILL to one: the others end, and say why.
  started = start("train", 2, workdir, tmp_path / "second", *long)
  wait_for_steps(started, workdir, tmp_path / "second", first + 6)
  started[1].kill()
  ended = processes.finish_joined(started, tmp_path / "second", timeout=200)
  assert [status for status, _ in ended] == [1, -signal.SIGKILL], ended
  assert "Process 1 has failed (it has died without a word)" in ended[0][1], ended[0][1]
  assert f"going on after step {first} " in ended[0][1]

  # One process goes on with what both had, to the end; both evaluate it.
  started = start("train", 1, workdir, tmp_path / "third", f"--config.training.steps={first + 8}")
  ((status, output),) = processes.finish_joined(started, tmp_path / "third")
  assert status == 0, output
  resumed = int(re.search(r"going on after step (\d+) ", output)[1])
  assert resumed > first and "was saved by 2 processes: what they held is divided over 1" in output
  lines = read_metrics(workdir, "train")
  assert [line["step"] for line in lines] == list(range(1, first + 8 + 2))  # with the critic's warm-up
  assert {line["num_trajectories"] for line in lines} == {4}
  assert all(line["rollouts_trained"] == 4 * (line["step"] - 1) for line in lines)  # none lost, none twice

  started = start("evaluate", 2, workdir, tmp_path / "fourth")
  ended = processes.finish_joined(started, tmp_path / "fourth")
  assert [status for status, _ in ended] == [0, 0], ended
  assert json.loads((workdir / "evaluation_train.json").read_text())["heldout_trials"] == 6
