"""Training with latent, sparse attention: the indexers never change, the critic's attention is frozen by name."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from toys import latent_toy, training_toy

from sao_jax.config import ModelConfig
from sao_jax.configuration.relations import validate
from sao_jax.errors import ConfigError
from sao_jax.learner import placement, setup
from sao_jax.models.attention.sparse import indexer_paths
from sao_jax.models.critic import critic_params_from_policy, critic_specs, frozen_critic_paths
from sao_jax.parallel.params import path_name, path_names
from sao_jax.training.sft import make_sft_step
from sao_jax.types import TrajectoryBatch

MODEL = dataclasses.replace(
  latent_toy.CONFIG, vocab_size=training_toy.VOCABULARY, indexer_types=("full", "shared"), num_experts=2,
  d_ff_expert=16, num_dense_layers=1, index_topk=6,
)  # fmt: skip
LATENT = ("q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "o")
INDEXER = {f"indexer_layers/{name}" for name in ("q", "k", "k_norm", "k_norm_bias", "weights")}


def test_frozen_paths_are_an_explicit_list():
  expected = {f"{stack}_layers/attention/{name}" for stack in ("dense", "moe") for name in LATENT} | INDEXER
  names = set(path_names(critic_specs(MODEL)))
  assert frozen_critic_paths(MODEL) == expected
  assert expected == {name for name in names if "/attention/" in name or name.startswith("indexer_layers/")}
  assert frozen_critic_paths(MODEL, attention=False) == INDEXER == indexer_paths(MODEL)
  assert indexer_paths(ModelConfig()) == frozenset()


def make_batch(rows=2, length=16):
  """Every token but a row's first is sampled; the first row wins."""
  rng = np.random.default_rng(0)
  row = lambda values, dtype: np.tile(np.asarray(values, dtype), (rows, 1))
  sampled = row([False] + [True] * (length - 1), bool)
  rewards = np.zeros((rows, length), np.float32)
  rewards[0, -1] = 1.0
  return TrajectoryBatch(
    token_ids=rng.integers(0, training_toy.VOCABULARY, (rows, length)).astype(np.int32),
    segment_ids=row([1] * length, np.int32),
    trajectory_ids=row([1] * length, np.int32),
    positions=row(range(length), np.int32),
    action_mask=sampled,
    loss_mask=sampled,
    behavior_logprobs=np.where(sampled, np.float32(-3.4), np.float32(np.nan)),
    policy_version=np.where(sampled, 0, -1).astype(np.int32),
    rewards=rewards,
    truncated=row([False] * length, bool),
  )


def named(tree):
  return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_training_leaves_the_indexers_alone(monkeypatch):
  """A step of reinforcement learning, of both networks, and one of imitation, with weight decay."""
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
  model = dataclasses.replace(MODEL, num_experts=0)
  config = dataclasses.replace(training_toy.get_config(), model=model)
  config = training_toy.replace(config, algorithm={"value_updates": 1, "advantage_values": "pre"})
  learner = setup.make_learner(config)
  first = setup.init_policy_params(learner, 0)
  critic = critic_params_from_policy(first, model, initializer="normal")  # a zero head would give no gradients
  before = named(first)
  imitate = make_sft_step(learner.policy)
  imitated, _ = imitate(setup.make_network_state(learner.policy, learner.layout, first), make_batch())
  state, metrics = setup.make_step(learner)(setup.make_state(learner, first, critic), make_batch())
  assert metrics["policy_updates_skipped"] == metrics["critic_updates_skipped"] == 0
  expected = ((imitated, INDEXER), (state.policy, INDEXER), (state.critic, frozen_critic_paths(model)))
  for network, frozen in expected:
    after = named(network.params)
    assert {name for name in after.keys() & before.keys() if np.array_equal(before[name], after[name])} == frozen
    assert not any(name.endswith(tuple(frozen)) for name in named(network.opt_state))


REFUSED = {
  "widths": ({"v_head_dim": 0}, "v_head_dim as well"),
  "odd": ({"qk_rope_head_dim": 5}, "odd"),
  "without latents": ({"kv_lora_rank": 0}, "there is no latent attention"),
  "grouped": ({"num_kv_heads": 2}, "2 of 4"),
  "bias": ({"attention_bias": True}, "not implemented for latent attention"),
  "bias of the output": ({"attention_out_bias": True}, "not implemented for latent attention"),
  "no heads": ({"index_num_heads": 0}, "0 heads"),
  "narrow": ({"index_head_dim": 2}, "cannot hold the 4"),
  "kinds": ({"indexer_types": ("full",)}, "1 kinds of 2 layers"),
  "shared first": ({"indexer_types": ("shared", "full")}, "the first layer is shared"),
  "no indexers": ({"index_topk": 0}, "leaves indexers out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_cannot_work_is_refused(name):
  changes, problem = REFUSED[name]
  config = dataclasses.replace(training_toy.get_config(), model=dataclasses.replace(MODEL, **changes))
  with pytest.raises(ConfigError, match=problem):
    validate(config, training=False)


def test_attention_that_can_work_is_not_refused():
  for model in (MODEL, dataclasses.replace(MODEL, index_topk=0, indexer_types=())):
    validate(dataclasses.replace(training_toy.get_config(), model=model), training=False)
