"""Two steps on eight devices of what further families bring: LoRA trains; base and frozen attention stay."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from toys import training_toy
from toys.trajectories import make_trajectories

from sao_jax.config import LoRAConfig
from sao_jax.configuration.relations import validate
from sao_jax.huggingface.families import from_hf_config
from sao_jax.learner import setup
from sao_jax.learner.packing import pack, shard_batch
from sao_jax.models.critic import critic_params_from_policy, frozen_critic_paths
from sao_jax.parallel.params import path_name

SMALL = {
  "vocab_size": training_toy.VOCABULARY,
  "hidden_size": 16,
  "intermediate_size": 32,
  "num_hidden_layers": 1,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64}
LATENT = SMALL | {
  "num_hidden_layers": 2,
  "num_key_value_heads": 4,
  "kv_lora_rank": 8,
  "q_lora_rank": 8,
  "qk_nope_head_dim": 6,
  "qk_rope_head_dim": 4,
  "v_head_dim": 4,
  "n_routed_experts": 4,
  "num_experts_per_tok": 2,
  "moe_intermediate_size": 8,
  "first_k_dense_replace": 1,
  "n_group": 2,
  "topk_group": 1,
}
FILES = {
  "qwen2": SMALL,
  "llama": SMALL | {"rope_parameters": LLAMA3},
  "mistral": SMALL | {"sliding_window": None},
  "seed_oss": SMALL | {"head_dim": 4, "attention_out_bias": True},
  "deepseek_v3": LATENT | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
  "glm4_moe_lite": LATENT,
}


def named(tree):
  return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("family", FILES)
def test_two_steps(family):
  config = training_toy.replace(
    training_toy.get_config(),
    model=vars(from_hf_config(FILES[family] | {"model_type": family})) | {"lora": LoRAConfig(rank=2)},
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
  assert any("o_bias" in name for name in fixed) == (family == "seed_oss")
