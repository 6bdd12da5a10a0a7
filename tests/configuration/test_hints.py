"""Settings that work but are probably not meant are said, and nothing else is."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from toys import training_toy

from configs import calculator, reasoning_gym
from sao_jax.algorithm.value_loss import value_loss
from sao_jax.config import ModelConfig, OptimizerConfig, RunConfig
from sao_jax.configuration import config_tree
from sao_jax.configuration.hints import IDLE, hints
from sao_jax.configuration.relations import validate
from sao_jax.models.router import route

VALID = RunConfig(environment=training_toy.Parity())
GRPO = {"algorithm.advantage": "grpo", "algorithm.critic_warmup_steps": 0, "rollout.group_size": 8}
EXPERTS = {"model.num_experts": 4}


@pytest.mark.parametrize(
  "overrides",
  [
    GRPO,
    EXPERTS | {"algorithm.freeze_router": True, "model.router": "sigmoid"},
    EXPERTS | {"model.num_experts_per_token": 1, "model.renormalize_router": False},
    {"model.num_experts_per_token": 2},  # the default
    {"algorithm.value_clip": 0.2},
    {"algorithm.policy_loss": "ppo", "algorithm.epsilon_low": 0.2, "algorithm.epsilon_high": 0.28},
    {"algorithm.value_head": "hl_gauss", "algorithm.value_bins": 11},
    {"model.yarn.factor": 2.0, "model.yarn.beta_fast": 16.0},
    {"model.lora.rank": 4, "model.lora.alpha": 8.0, "critic.lora.rank": 4, "critic.lora.alpha": 8.0},
    {"rollout.max_staleness": 2, "rollout.staleness": "mask"},
    {"rollout.max_in_flight": 100},
  ],
)
def test_what_has_an_effect_is_not_hinted_at(overrides):
  assert not list(hints(config_tree.replace(VALID, overrides)))


@pytest.mark.parametrize("config", [VALID, calculator.get_config(), reasoning_gym.get_config()], ids=lambda c: c.name)
def test_nothing_is_hinted_at_in_what_is_shipped(config):
  assert not list(hints(config))


@pytest.mark.parametrize(
  "overrides, words",
  [
    (GRPO | {"algorithm.value_updates": 4}, "critic nor a discount, so algorithm.value_updates will have no effect"),
    ({"algorithm.value_updates": 1, "algorithm.value_clip": 0.2}, "algorithm.value_clip will have no effect"),
    ({"algorithm.value_bins": 11, "algorithm.value_max": 2.0}, "value_bins, algorithm.value_max will have no effect"),
    ({"model.d_ff_expert": 32, "algorithm.freeze_router": True}, "model.d_ff_expert, algorithm.freeze_router will"),
    (EXPERTS | {"model.num_dense_layers": 2, "model.d_ff_shared": 8}, "model.d_ff_shared will have no effect"),
    (GRPO | {"algorithm.policy_lambda": 0.9}, "critic nor a discount, so algorithm.policy_lambda will have no effect"),
    ({"algorithm.baseline_window": 9}, "has a baseline, so algorithm.baseline_window will have no effect"),
    ({"algorithm.loss_length": 9}, "divides by a length, so algorithm.loss_length will have no effect"),
    (
      {"algorithm.policy_lambda": 0.95, "algorithm.alpha": 2.0},
      "for all lengths, so algorithm.alpha will have no effect",
    ),
    ({"algorithm.policy_loss": "ppo"}, "Usual for it: 0.2 and 0.28"),
    ({"algorithm.policy_loss": "reinforce", "algorithm.epsilon_low": 0.2}, "algorithm.epsilon_low will have no effect"),
    ({"model.yarn.beta_slow": 2.0}, "model.yarn.beta_slow will have no effect"),
    ({"model.yarn.factor": 2.0, "model.yarn.ramp": "turns", "model.yarn.truncate": False}, "model.yarn.truncate will"),
    ({"model.yarn.factor": 2.0, "model.yarn.mscale_all_dim": 1.0}, "model.yarn.mscale_all_dim will have no effect"),
    ({"model.lora.alpha": 8.0}, "model.lora.alpha will have no effect"),
    ({"critic.lora.targets": ("mlp",)}, "critic.lora.targets will have no effect"),
    (GRPO | {"critic.lora.rank": 4}, "critic nor a discount, so critic.lora.rank will have no effect"),
    ({"critic.lora.rank": 4, "algorithm.freeze_embeddings": True}, "embeddings, so algorithm.freeze_embeddings will"),
    ({"model.index_head_dim": 8}, "model.index_head_dim will have no effect"),
    ({"rollout.max_staleness": -1, "rollout.staleness": "mask"}, "rollout.staleness will have no effect"),
    ({"rollout.sampler_devices": 1}, "rollout.sampler_devices will have no effect"),
    ({"sampler.cache_layout": "slots", "sampler.num_pages": 99}, "sampler.num_pages will have no effect"),
    ({"sampler.cache_layout": "pages", "sampler.decode_batch": 8}, "sampler.decode_batch will have no effect"),
    ({"sampler.cache_layout": "pages", "sampler.prefill_batch": 1}, "sampler.prefill_batch will have no effect"),
    ({"sampler.page_size": 64, "sampler.prefill_chunk": 8}, "here, so sampler.page_size, sampler.prefill_chunk will"),
    (
      {"value_pretraining.heldout_fraction": 0.0, "value_pretraining.patience": 3},
      "value_pretraining.patience will have no effect",
    ),
    ({"training.audit": False, "training.audit_tolerance": 1.0}, "training.audit_tolerance will have no effect"),
    (EXPERTS | {"model.num_experts_per_token": 1}, "the routers get no gradient"),
    ({"rollout.group_size": 2}, "Set it to 1, or use algorithm.advantage=grpo"),
    ({"policy_optimizer": OptimizerConfig(learning_rate=0.0)}, "the policy will never change"),
    ({"critic_optimizer": OptimizerConfig(learning_rate=0.0)}, "the critic will never change"),
    ({"rollout.max_staleness": 2}, "'mask'"),
    ({"rollout.max_in_flight": 8}, "24 of 32 slots"),
  ],
)
def test_each_hint_names_its_fields_and_the_remedy(overrides, words):
  sections = {path: value for path, value in overrides.items() if "." not in path}
  config = config_tree.replace(VALID, {path: overrides[path] for path in overrides.keys() - sections.keys()})
  (hint,) = hints(dataclasses.replace(config, **sections))
  unnamed = {*GRPO, *EXPERTS, "algorithm.policy_lambda", "model.num_dense_layers", "model.yarn.factor"}
  assert words in hint and all(path in hint for path in overrides.keys() - unnamed)


def test_the_fields_of_hints_exist():
  for idle in IDLE:
    for path in idle.fields:
      config_tree.get(VALID, path)


def test_hints_are_logged_where_training_is_checked_and_only_there(monkeypatch):
  said = []
  monkeypatch.setattr(logging, "warning", lambda message, *arguments: said.append(message % arguments))
  config = config_tree.replace(VALID, {"algorithm.value_bins": 11})
  validate(config, training=False)
  assert not said
  validate(config, training=True)
  assert len(said) == 1 and "algorithm.value_bins" in said[0]


# The hints are true.


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_single_expert_of_weight_one_gives_its_router_no_gradient(renormalize):
  model = ModelConfig(num_experts=4, num_experts_per_token=1, renormalize_router=renormalize)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 64)), jnp.float32)
  weights = lambda router: jnp.sum(route({"router": router}, x, model).weights ** 2)
  gradient = jax.grad(weights)(jnp.asarray(np.random.default_rng(1).normal(size=(64, 4)), jnp.float32))
  assert (float(jnp.abs(gradient).max()) < 1e-6) == renormalize  # of rounding


def test_clipping_around_the_value_itself_changes_no_gradient():
  old, targets, mask = jnp.array([0.1, -0.4, 0.9]), jnp.array([1.0, 0.0, 1.0]), jnp.ones(3, bool)
  gradient = lambda clip: jax.grad(lambda v: jnp.sum(value_loss(v, targets, mask, old_values=old, clip=clip)))(old)
  np.testing.assert_array_equal(gradient(0.2), gradient(0.0))
