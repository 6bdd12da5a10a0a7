"""Health rules: each speaks once when its fault begins, with a remedy, and never about what is undefined."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from toys.paths import REPOSITORY

from sao_jax.report.health import CLEAR, RULES, Health, was_skipped
from sao_jax.report.metrics import read_metrics
from sao_jax.report.run_log import RunLog

HEALTHY = {
  "policy_updates_skipped": 0.0,
  "critic_updates_skipped": 0.0,
  "num_trained_tokens": 900.0,
  "num_sampled_tokens": 1000.0,
  "num_trajectories": 8.0,
  "num_truncated": 1.0,
  "rejected_low": 0.001,
  "rejected_high": 0.002,
  "explained_variance": 0.4,
  "policy_grad_norm": 0.5,
  "critic_grad_norm": 3.0,
  "trainer_idle_fraction": 0.1,
  "take_wait_fraction": 0.1,
  "used_over_generated_latency": 0.98,
  "dropped_fraction": 0.0,
  "entropy": 0.7,
}


def healthy(step: int) -> dict:
  return HEALTHY | {"reward_mean": 0.5 + 0.01 * (step % 7)}


def names(health: Health, metrics: dict, steps: int = 1) -> list[str]:
  return [alarm.name for step in range(steps) for alarm in health.look(healthy(step) | metrics)]


FAULTS = {
  "skipped_updates": ({"policy_updates_skipped": 1.0, "critic_updates_skipped": 2.0}, "max_skipped_updates"),
  "nothing_trained": ({"num_trained_tokens": 0.0}, "algorithm.truncation='zero'"),
  "rejected_some": ({"rejected_low": 0.02}, "rollout.admission_staleness"),
  "rejected_many": ({"rejected_low": 0.08}, "delta_logprob_by_lag"),
  "negative_explained_variance": ({"explained_variance": -0.5}, "launch.pretrain_value"),
  "policy_gradient_jump": ({"policy_grad_norm": 50.0}, "policy_optimizer.learning_rate"),
  "critic_gradient_jump": ({"critic_grad_norm": 300.0}, "critic_optimizer.learning_rate"),
  "trainer_idle": ({"trainer_idle_fraction": 0.9, "take_wait_fraction": 0.9}, "most of it for: take"),
  "short_episodes_preferred": (
    {"used_over_generated_latency": 0.6, "dropped_fraction": 0.1},
    "rollout.max_staleness",
  ),
  "equal_rewards": ({"reward_mean": 0.0}, "launch.sft"),
  "cut_episodes": ({"num_truncated": 8.0}, "rollout.max_turns"),
  "low_entropy": ({"entropy": 1e-4}, "policy_optimizer.learning_rate"),
}


def test_an_expert_that_always_succeeds_is_no_alarm():
  assert names(Health(), {"reward_mean": 1.0, "num_demonstrations": 8.0}, 200) == []


def test_every_rule_has_a_fault_here_and_a_row_in_the_readme():
  assert FAULTS.keys() == {rule.name for rule in RULES}
  section = (REPOSITORY / "launch/README.md").read_text().split("## What the log warns of")[1].split("\n## ")[0]
  rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
  assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == [rule.name for rule in RULES]
  assert names(Health(), {}, 200) == []


@pytest.mark.parametrize("rule", FAULTS)
def test_a_rule_speaks_once_per_onset_and_again_after_it_has_cleared(rule):
  fault, remedy = FAULTS[rule]
  health = Health()
  assert names(health, {}, 60) == []
  said = [alarm for step in range(60) for alarm in health.look(healthy(step) | fault)]
  texts = {alarm.name: alarm.text for alarm in said}
  assert len(said) == len(texts) and remedy in texts[rule]
  assert set(texts) <= {rule, "rejected_some"}  # the share passes through one per cent on its way

  # A short relief is no new onset; a long one is.
  assert rule not in names(health, {}, CLEAR - 5) + names(health, fault, 1)
  names(health, {}, 120)
  assert names(health, fault, 60).count(rule) == 1


@pytest.mark.parametrize("missing", [math.nan, None, np.float32("nan"), np.float32("inf")])
def test_what_is_undefined_or_missing_is_no_fault(missing):
  """Imitation has no rewards, GRPO no critic, value pretraining no policy, equal returns no explained variance."""
  health = Health()
  for step in range(150):
    assert health.look(dict.fromkeys(healthy(step), missing)) == []
    assert health.look({"sft_loss": 1.0, "lag_histogram": np.zeros(3), "rollouts_by_reason": {"a": 1}}) == []
  assert health.skipped_in_a_row == 0


def test_episodes_of_another_length_are_no_preference_as_long_as_none_is_dropped():
  """As after a resume, or with a policy that never changes."""
  assert names(Health(), {"used_over_generated_latency": 0.6, "dropped_fraction": 0.0}, 60) == []


def test_updates_without_tokens_are_not_counted_among_the_broken_ones():
  skipped = {"policy_updates_skipped": 1.0}
  assert was_skipped(skipped) and was_skipped(skipped | {"num_sampled_tokens": 3.0})
  assert not was_skipped(skipped | {"num_trained_tokens": 0.0, "num_sampled_tokens": 3.0})
  health = Health()
  for expected, metrics in ((1, skipped), (2, skipped), (0, {"policy_updates_skipped": 0.0}), (1, skipped)):
    health.look(metrics)
    assert health.skipped_in_a_row == expected


def test_an_alarm_is_logged_and_stands_in_the_line_of_its_step(tmp_path, caplog):
  with RunLog(tmp_path, "train", total=9, every=100, max_skipped_updates=3) as log:
    for step in range(1, 9):
      broken = {"critic_updates_skipped": np.float32(2.0), "num_trained_tokens": np.float32(5.0)}
      log.push(step, healthy(step) | (broken if step >= 5 else {}))
    assert log.skipped_in_a_row == 3 and log.diverged
    log.flush()
  (line,) = read_metrics(tmp_path, "train")
  assert line["step"] == 5 and line["critic_updates_skipped"] == 2.0
  (alarm,) = line["alarms"]
  assert alarm.startswith("skipped_updates: updates were left out (policy 0, critic 2)")
  assert caplog.text.count("Step 5: updates were left out") == 1
