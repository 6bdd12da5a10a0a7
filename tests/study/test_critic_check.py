"""A corridor's run, small: it imitates and trains, and its critic is compared with the oracle of the task."""

from __future__ import annotations

import dataclasses
import json
import types

import jax
import pytest
from toys.wiring import program_module

from configs.corridor import corridor_config
from sao_jax.config import AlgorithmConfig, TrainingConfig
from sao_jax.environments.corridor import Corridor
from sao_jax.errors import ConfigError
from sao_jax.learner import placement
from sao_jax.report.metrics import metric_lines
from sao_jax.study.critic_check import check_critic
from sao_jax.training import loop


def small_config():
  config = corridor_config(Corridor(horizon=2, clutter=1), batch=4)
  replace = dataclasses.replace
  return replace(
    config,
    algorithm=AlgorithmConfig(critic_warmup_steps=0),
    sampler=replace(config.sampler, num_slots=8, decode_batch=8, prefill_batch=2),
    rollout=replace(config.rollout, row_counts=config.rollout.row_counts[-1:]),
    evaluation=replace(config.evaluation, every=0),
    training=TrainingConfig(steps=2, audit=False, trackers=()),
  )


def test_a_corridor_is_trained_on_and_its_critic_compared_with_the_oracle(tmp_path, monkeypatch):
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
  config = small_config()
  assert not loop.train(config, tmp_path).interrupted
  assert [line["num_trajectories"] for line in metric_lines(tmp_path, "train")] == [4, 4]

  # A random policy hardly says a word, and every walk earns 0: nothing is left to explain.
  oracle = program_module("oracle")
  monkeypatch.setattr(oracle, "_PHASE", types.SimpleNamespace(value="train"))
  monkeypatch.setattr(oracle, "_TRAJECTORIES", types.SimpleNamespace(value=6))
  oracle.main(config, str(tmp_path))
  record = json.loads((tmp_path / "oracle_train.json").read_text())
  assert record["trajectories"] == 6 and record["tokens"] >= 6 and record["reward_mean"] == 0.0
  assert record["oracle"] is None and record["states"] >= 3

  # What cannot be compared is refused by name.
  with pytest.raises(ConfigError, match="no checkpoint of value_pretraining"):
    check_critic(config, tmp_path, "value_pretraining", 6)
  untold = dataclasses.replace(config, environment=types.SimpleNamespace(name="untold"))
  with pytest.raises(ConfigError, match="tells no states"):
    check_critic(untold, tmp_path, "train", 6)
