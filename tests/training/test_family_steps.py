"""Two steps on eight devices of what further families bring: LoRA trains; base and frozen attention stay."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from toys import training_toy
from toys.trajectories import make_trajectories

from sao_jax.config import LoRAConfig, YarnConfig
from sao_jax.configuration.relations import validate
from sao_jax.learner import setup
from sao_jax.learner.packing import pack, shard_batch
from sao_jax.models.critic import critic_params_from_policy, frozen_critic_paths
from sao_jax.parallel.params import path_name

# Every bias of attention, and frequencies of Llama 3.1; latent attention without an indexer, and YaRN of DeepSeek-V3.
GROUPED = {
  "num_experts": 0,
  "num_heads": 4,
  "num_kv_heads": 2,
  "qk_norm": False,
  "attention_bias": True,
  "attention_out_bias": True,
}
GROUPED |= {"yarn": YarnConfig(8.0, 64, beta_fast=4.0, attention_factor=1.0, ramp="turns")}
LATENT = {
  "num_heads": 4,
  "num_kv_heads": 4,
  "kv_lora_rank": 8,
  "q_lora_rank": 8,
  "qk_nope_head_dim": 6,
  "v_head_dim": 4,
}
LATENT |= {"qk_rope_head_dim": 4, "num_experts": 4, "router": "sigmoid", "num_expert_groups": 2, "d_ff_expert": 8}
LATENT |= {"yarn": YarnConfig(40.0, 64, attention_factor=1.0, mscale_all_dim=1.0), "d_ff_shared": 8, "qk_norm": False}


def named(tree):
  return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("model", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_two_steps(model):
  config = training_toy.replace(
    training_toy.get_config(),
    model=model | {"lora": LoRAConfig(rank=2)},
    algorithm={"value_updates": 1, "advantage_values": "pre"},
    mesh={"data": 1, "fsdp": 2, "context": 2, "tensor": 2},
  )
  validate(config, training=True)
  learner = setup.make_learner(config)
  first = setup.init_policy_params(learner, seed=0)
  base = {name: leaf for name, leaf in first.items() if name != "lora"}
  critic = critic_params_from_policy(base, config.model, initializer="normal")
  before = named(first), named(critic)
  state, step = setup.make_state(learner, first, critic), setup.make_step(learner)
  batch = shard_batch(pack(make_trajectories(), (32,), (16,), setup.rows_multiple(learner)), learner.layout)
  for _ in range(2):
    state, metrics = step(state, batch)
    assert metrics["policy_updates_skipped"] == metrics["critic_updates_skipped"] == 0

  # Exactly the factors and what is not frozen have moved; biases are among what is.
  fixed = {name for name in before[0] if not name.startswith("lora/")} | {"lora/scale"}
  for network, old, frozen in zip(
    (state.policy, state.critic), before, (fixed, frozen_critic_paths(config.model)), strict=True
  ):
    new = named(network.params)
    assert {name for name in old if np.array_equal(old[name], new[name])} == frozen
  assert any("o_bias" in name for name in fixed) == ("attention_out_bias" in model)
