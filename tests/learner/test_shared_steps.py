"""Runs of the tests share a train step only where all that it is made of is the same."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from toys import shared_steps, training_toy

from sao_jax.config import CriticConfig, LoRAConfig
from sao_jax.environments.calculator import Calculator
from sao_jax.learner import compilation, setup
from sao_jax.learner.batches import abstract_rows

CONFIG = training_toy.get_config()


def key(config=CONFIG, *, devices=1, freeze=True, kind=True, rows=0):
  learner = setup.make_learner(config, tuple(jax.devices()[:devices]), freeze=freeze)
  step = compilation.make_step(learner, update_policy=kind, rows=rows)
  return step.lower(setup.abstract_state(learner), next(iter(abstract_rows(learner)))).key


def test_runs_of_other_lengths_and_environments_share_it():
  other = training_toy.replace(CONFIG, training={"steps": 9}, evaluation={"every": 2}, sft={"steps": 1})
  assert key(dataclasses.replace(other, environment=Calculator(), name="other")) == key() == key()


@pytest.mark.parametrize(
  "other",
  [
    *({"kind": False}, {"freeze": False}, {"devices": 2}, {"rows": 16}),
    *(
      {"config": training_toy.replace(CONFIG, **{section: fields})}
      for section, fields in {
        "algorithm": {"epsilon_low": 0.25},
        "model": {"rope_theta": 123.0},
        "policy_optimizer": {"learning_rate": 0.5},
        "critic_optimizer": {"clip_norm": 3.0},
        "sampler": {"temperature": 0.5},
        "rollout": {"max_staleness": 7},
      }.items()
    ),
  ],
)
def test_another_one_is_not_shared(other):
  assert key(**other) != key()


def test_factors_of_a_critic_are_not_those_of_a_full_one():
  config = training_toy.replace(CONFIG, model={"lora": LoRAConfig(rank=2)})
  assert key(config) != key(dataclasses.replace(config, critic=CriticConfig(LoRAConfig(rank=2))))


def test_it_is_made_once_and_again_when_all_are_given_back(monkeypatch):
  monkeypatch.setattr(shared_steps, "_programs", type(shared_steps._programs)())
  made = []
  step = shared_steps.Compilable(lambda: made.append(None) or "program", ("a key",))
  assert step.compile() == step.compile() == "program" and len(made) == 1
  shared_steps.clear()
  assert step.compile() == "program" and len(made) == 2
