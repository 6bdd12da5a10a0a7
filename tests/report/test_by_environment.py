"""Numbers of each environment: what a step's trajectories earned and told, over one process and several."""

from __future__ import annotations

import dataclasses
import math

import pytest
from toys.rollout_fakes import make_trajectory
from toys.shared_store import SharedStore, together

from sao_jax.episode import PromptKey
from sao_jax.evaluation.heldout import Evaluation
from sao_jax.report.by_environment import added, environment_metrics, success_sums
from sao_jax.report.success_rate import success
from sao_jax.training.process_metrics import reduced


def trajectory(environment, reward=1.0, **info):
  made = make_trajectory(0, reward=reward, info={"latency": 1.0, "environment_seconds": 0.5} | info)
  return dataclasses.replace(made, key=PromptKey(environment, 0, 0))


STEP = [
  trajectory("a", 1.0, style=0.5, quality=1.0),
  trajectory("a", 0.0, style=1.0),
  trajectory("b/c", 0.25, style=math.nan, tool=2.0),
]


def test_facts_are_means_over_those_who_tell_them():
  metrics = environment_metrics(STEP)
  assert math.isnan(metrics.pop("info_style/b/c"))
  assert metrics == {
    "environment_names_left_out": 0,
    "environment_trajectories/a": 2,
    "environment_reward/a": 0.5,
    "info_style/a": 0.75,
    "info_quality/a": 1.0,
    "environment_trajectories/b/c": 1,
    "environment_reward/b/c": 0.25,
    "info_tool/b/c": 2.0,
  }


def test_names_are_bounded_and_what_is_left_out_is_counted():
  many = environment_metrics([trajectory(f"e{number:03d}") for number in range(50)])
  assert sum(key.startswith("environment_reward/") for key in many) == 32 and many["environment_names_left_out"] == 18
  many = environment_metrics([trajectory("a", **{f"x/{number:03d}": number for number in range(40)})])
  assert many["environment_names_left_out"] == 8 and many["info_x_031/a"] == 31


def test_several_processes_have_the_means_over_all_their_episodes():
  shares = [STEP, [trajectory("a", 0.5, style=0.0), trajectory("d", 1.0)]]
  own = [environment_metrics(share) for share in shares]
  writer, _ = together(SharedStore(), 2, lambda processes: reduced(processes, own[processes.index]))
  together_ = environment_metrics([*shares[0], *shares[1]])
  for key, value in together_.items():
    assert writer[key] == pytest.approx(value, nan_ok=True), key


def test_an_evaluation_has_the_success_of_each_of_several_environments():
  sums = success_sums(STEP, 0.5, {"a", "b/c", "failed"})
  assert sums["a"] == {"successes": 1, "trials": 2, "reward": 1.0} and sums["failed"]["trials"] == 0
  assert added([sums, sums])["a"] == {"successes": 2, "trials": 4, "reward": 2.0}
  metrics = Evaluation(success(1, 3, 0.9), 0.4, 5.0, 1, 7, [], environments=sums).metrics()
  assert (metrics["heldout_success/a"], metrics["heldout_low/a"]) == (0.5, success(1, 2, 0.9).low)
  assert metrics["heldout_success/b/c"] == 0.0 and metrics["heldout_reward/b/c"] == 0.25
  assert metrics["heldout_trials/failed"] == 0 and math.isnan(metrics["heldout_reward/failed"])

  # One environment is all there is.
  alone = Evaluation(success(1, 2, 0.9), 0.5, 5.0, 0, 7, [], environments={"a": sums["a"]})
  assert not [key for key in alone.metrics() if "/" in key]
