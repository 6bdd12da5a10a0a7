"""Two processes learn what a sampler of two others rolls out, on the loopback."""

from __future__ import annotations

import pytest
from toys import processes
from toys.paths import TESTS

from sao_jax.report.metrics import read_metrics

SCRIPT = str(TESTS / "toys" / "phases_run.py")
FIELDS = {
  "rollout.placement": "split",
  "rollout.sampler_hosts": 2,
  "rollout.hosts_per_sampler": 2,
  "evaluation.sampler": "shared",
  "evaluation.every": 2,
  "algorithm.critic_warmup_steps": 0,
  "training.steps": 3,
}


@pytest.mark.timeout(400)
def test_a_sampler_of_two_processes_rolls_out_is_published_to_evaluates_and_ends_with_the_run(tmp_path):
  workdir = tmp_path / "run"
  command = [SCRIPT, str(workdir), "train", *(f"{field}={value!r}" for field, value in FIELDS.items())]
  ended = processes.finish_joined(processes.start_joined(4, command, tmp_path, devices=1), tmp_path, timeout=350)
  assert [status for status, _ in ended] == [0] * 4, ended
  assert "agree to" in ended[2][1] and "(4 episodes)" in ended[2][1]  # the audit, with the two that learn

  # Batches of its rollouts, by weights that are not older than they may be; evaluations with weights that stay.
  lines = read_metrics(workdir, "train")
  steps = [line for line in lines if "num_trajectories" in line]
  assert [line["step"] for line in steps] == [1, 2, 3] and {line["num_trajectories"] for line in steps} == {4}
  assert all(line["lag_mean"] <= line["step"] - 1 for line in steps)
  evaluated = [(line["policy_version"], line["heldout_trials"]) for line in lines if "heldout_trials" in line]
  assert evaluated == [(0, 6), (2, 6), (3, 6)]
