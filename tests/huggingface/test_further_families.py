"""config.json of Llama, Mistral, Qwen2.5, Seed-OSS, GLM-4.7-Flash, DeepSeek-V3, Kimi K2: as published, and refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from toys.hf_toy import change_folder, make_folder

from sao_jax.config import ModelConfig, YarnConfig
from sao_jax.errors import ConfigError
from sao_jax.huggingface.families import family_of_fields, from_hf_config, glm4_moe_lite, mistral, seed_oss
from sao_jax.huggingface.folder import HFFolder
from sao_jax.huggingface.load import import_policy
from sao_jax.huggingface.published import PUBLISHED
from sao_jax.huggingface.save import export_policy

# As published: https://huggingface.co/deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B/blob/main/config.json and so on.
R1_DISTILL = {
  "architectures": ["Qwen2ForCausalLM"],
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151643,
  "hidden_act": "silu",
  "hidden_size": 1536,
  "initializer_range": 0.02,
  "intermediate_size": 8960,
  "max_position_embeddings": 131072,
  "max_window_layers": 21,
  "model_type": "qwen2",
  "num_attention_heads": 12,
  "num_hidden_layers": 28,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-06,
  "rope_theta": 10000,
  "sliding_window": 4096,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.44.0",
  "use_cache": True,
  "use_mrope": False,
  "use_sliding_window": False,
  "vocab_size": 151936,
}
LLAMA = {
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 128000,
  "eos_token_id": [128001, 128008, 128009],
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 14336,
  "max_position_embeddings": 131072,
  "mlp_bias": False,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.43.0",
  "use_cache": True,
  "vocab_size": 128256,
}
MISTRAL = {
  "architectures": ["MistralForCausalLM"],
  "attention_dropout": 0.0,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 14336,
  "max_position_embeddings": 32768,
  "model_type": "mistral",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05,
  "rope_theta": 1000000.0,
  "sliding_window": None,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "use_cache": True,
  "vocab_size": 32768,
}
SEED_OSS = {
  "architectures": ["SeedOssForCausalLM"],
  "attention_bias": True,
  "attention_dropout": 0.1,
  "attention_out_bias": False,
  "bos_token_id": 0,
  "eos_token_id": 2,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 5120,
  "initializer_range": 0.02,
  "intermediate_size": 27648,
  "max_position_embeddings": 524288,
  "mlp_bias": False,
  "model_type": "seed_oss",
  "num_attention_heads": 80,
  "num_hidden_layers": 64,
  "num_key_value_heads": 8,
  "pad_token_id": 1,
  "residual_dropout": 0.1,
  "rms_norm_eps": 1e-06,
  "rope_scaling": {"rope_type": "default"},
  "rope_theta": 10000000.0,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "use_cache": True,
  "vocab_size": 155136,
}
DEEPSEEK = {
  "architectures": ["DeepseekV3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
  "bos_token_id": 0,
  "eos_token_id": 1,
  "ep_size": 1,
  "first_k_dense_replace": 3,
  "hidden_act": "silu",
  "hidden_size": 7168,
  "initializer_range": 0.02,
  "intermediate_size": 18432,
  "kv_lora_rank": 512,
  "max_position_embeddings": 163840,
  "model_type": "deepseek_v3",
  "moe_intermediate_size": 2048,
  "moe_layer_freq": 1,
  "n_group": 8,
  "n_routed_experts": 256,
  "n_shared_experts": 1,
  "norm_topk_prob": True,
  "num_attention_heads": 128,
  "num_experts_per_tok": 8,
  "num_hidden_layers": 61,
  "num_key_value_heads": 128,
  "num_nextn_predict_layers": 1,
  "q_lora_rank": 1536,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "quantization_config": {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128]},
  "rms_norm_eps": 1e-06,
  "rope_scaling": {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
  },
  "rope_theta": 10000,
  "routed_scaling_factor": 2.5,
  "scoring_func": "sigmoid",
  "tie_word_embeddings": False,
  "topk_group": 4,
  "topk_method": "noaux_tc",
  "torch_dtype": "bfloat16",
  "use_cache": True,
  "v_head_dim": 128,
  "vocab_size": 129280,
}
KIMI = DEEPSEEK | {
  "aux_loss_alpha": 0.001,
  "first_k_dense_replace": 1,
  "max_position_embeddings": 131072,
  "model_type": "kimi_k2",
  "n_group": 1,
  "n_routed_experts": 384,
  "num_attention_heads": 64,
  "num_key_value_heads": 64,
  "num_nextn_predict_layers": 0,
  "rope_scaling": DEEPSEEK["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0},
  "rope_theta": 50000.0,
  "routed_scaling_factor": 2.827,
  "seq_aux": True,
  "topk_group": 1,
  "vocab_size": 163840,
}
FLASH = {
  "architectures": ["Glm4MoeLiteForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "eos_token_id": [154820, 154827, 154829],
  "first_k_dense_replace": 1,
  "hidden_act": "silu",
  "hidden_size": 2048,
  "intermediate_size": 10240,
  "kv_lora_rank": 512,
  "max_position_embeddings": 202752,
  "model_type": "glm4_moe_lite",
  "moe_intermediate_size": 1536,
  "n_group": 1,
  "n_routed_experts": 64,
  "n_shared_experts": 1,
  "norm_topk_prob": True,
  "num_attention_heads": 20,
  "num_experts_per_tok": 4,
  "num_hidden_layers": 47,
  "num_key_value_heads": 20,
  "num_nextn_predict_layers": 1,
  "partial_rotary_factor": 1.0,
  "q_lora_rank": 768,
  "qk_nope_head_dim": 192,
  "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-05,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "routed_scaling_factor": 1.8,
  "tie_word_embeddings": False,
  "topk_group": 1,
  "topk_method": "noaux_tc",
  "v_head_dim": 256,
  "vocab_size": 154880,
}
FOLDERS = {
  "R1-Distill-Qwen-1.5B": R1_DISTILL,
  "Llama-3.1-8B": LLAMA,
  "Mistral-7B-v0.3": MISTRAL,
  "Seed-OSS-36B": SEED_OSS,
  "DeepSeek-V3": DEEPSEEK,
  "Kimi-K2": KIMI,
  "GLM-4.7-Flash": FLASH,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_published_folders(name):
  fields = FOLDERS[name]
  config = from_hf_config(fields, ModelConfig(dtype="bfloat16"))
  assert config == PUBLISHED[name].model
  family = family_of_fields(fields)
  assert family.model_config(family.write(config), ModelConfig(dtype="bfloat16")) == config  # also not as first choice


def test_frequencies_of_other_llamas():
  """3.0 stretches nothing, 3.2 by 32; a factor of 1 is none."""
  plain = {name: value for name, value in LLAMA.items() if name != "rope_scaling"}
  assert from_hf_config(plain).yarn == YarnConfig()
  stretched = lambda factor: LLAMA | {"rope_scaling": LLAMA["rope_scaling"] | {"factor": factor}}
  assert from_hf_config(stretched(32.0)).yarn == dataclasses.replace(from_hf_config(LLAMA).yarn, factor=32.0)
  assert from_hf_config(stretched(1.0)).yarn == YarnConfig()
  assert from_hf_config(LLAMA | {"attention_bias": True}).attention_out_bias


def test_a_window_that_holds_the_whole_context_is_none():
  """Without the field there is one; YaRN makes the context longer."""
  assert from_hf_config(MISTRAL | {"sliding_window": 32768}) == from_hf_config(MISTRAL)
  without = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}
  yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768}}
  stretched = MISTRAL | yarn | {"max_position_embeddings": 65536}  # which says so already
  assert from_hf_config(stretched | {"sliding_window": 65536}) == from_hf_config(stretched)
  assert mistral.FAMILY.write(from_hf_config(MISTRAL))["sliding_window"] is None
  for fields in (without, MISTRAL | {"sliding_window": 4096}, MISTRAL | yarn | {"sliding_window": 32768}):
    with pytest.raises(ConfigError, match="sliding_window = "):
      from_hf_config(fields)


def test_dropout_of_seed_oss_is_read_and_not_written():
  written = seed_oss.FAMILY.write(from_hf_config(SEED_OSS))
  assert written["attention_dropout"] == written["residual_dropout"] == 0.0
  with pytest.raises(ConfigError, match="attention_dropout = 0.1"):
    from_hf_config(LLAMA | {"attention_dropout": 0.1})


def test_only_latent_attention_has_sharper_scores():
  """The ratio of the two goes to cos and sin in every family."""
  scaling = DEEPSEEK["rope_scaling"] | {"mscale": 0.5}
  ratio = (0.05 * np.log(40) + 1) / (0.1 * np.log(40) + 1)
  for fields, sharper in ((DEEPSEEK, 1.0), (LLAMA, 0.0)):
    config = from_hf_config(fields | {"rope_scaling": scaling})
    assert config.yarn.mscale_all_dim == sharper
    assert config.yarn.attention_factor == pytest.approx(ratio)
    family = family_of_fields(fields)
    assert family.model_config(family.write(config)) == config


def test_kinds_of_layers_of_glm_4_7_flash():
  """The list counts; without it the first layer is dense, and a file that says otherwise means another model."""
  listed = FLASH | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 45, "first_k_dense_replace": 2}
  config = from_hf_config(listed)
  assert config.num_dense_layers == 2
  assert glm4_moe_lite.FAMILY.model_config(glm4_moe_lite.FAMILY.write(config)) == config
  without = {name: value for name, value in FLASH.items() if name != "first_k_dense_replace"}
  assert from_hf_config(without).num_dense_layers == 1


REFUSED = {
  "a bias of the feed-forward part": (LLAMA, {"mlp_bias": True}, "mlp_bias = True"),
  "multimodal positions": (R1_DISTILL, {"use_mrope": True}, "use_mrope = True"),
  "windows in later layers": (R1_DISTILL, {"use_sliding_window": True}, "use_sliding_window = True"),
  "a detail of llama3 that is missing": (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "is missing"),
  "dynamic frequencies": (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
  "queries from the whole state": (DEEPSEEK, {"q_lora_rank": None}, "q_lora_rank = None"),
  "biases of latent attention": (DEEPSEEK, {"attention_bias": True}, "attention_bias = True"),
  "pairs of halves": (DEEPSEEK, {"rope_interleave": False}, "rope_interleave = False"),
  "fewer key-value heads": (DEEPSEEK, {"num_key_value_heads": 8}, "num_key_value_heads = 8"),
  "another rotated width": (DEEPSEEK, {"head_dim": 192}, "head_dim = 192"),
  "another name of the rotated width": (FLASH, {"head_dim": 32}, "head_dim = 32"),
  "half of it": (FLASH, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
  "softmax": (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
  "every other layer": (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
  "dense layers that are not listed": (FLASH, {"first_k_dense_replace": 3}, "first_k_dense_replace = 3"),
  "dense layers behind": (FLASH, {"mlp_layer_types": ["sparse"] * 46 + ["dense"]}, "mlp_layer_types"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(name):
  fields, changes, problem = REFUSED[name]
  with pytest.raises(ConfigError) as error:
    from_hf_config(fields | changes)
  assert problem in error.value.problem


def test_a_kimi_stays_one(tmp_path):
  """It is read as a DeepSeek-V3, and its export has its name, its fields and the bits of its tensors."""
  tiny = ModelConfig(
    vocab_size=40, num_layers=2, d_model=16, num_heads=2, num_kv_heads=2, head_dim=4, d_ff=24, num_experts=4,
    d_ff_expert=8, d_ff_shared=8, num_dense_layers=1, router="sigmoid", qk_norm=False, kv_lora_rank=6, q_lora_rank=10,
    qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=3, yarn=PUBLISHED["Kimi-K2"].model.yarn,
  )  # fmt: skip
  folder, params = make_folder(tmp_path / "a", tiny)
  assert folder.fields["model_type"] == "deepseek_v3"
  assert folder.fields["rope_scaling"]["mscale"] == folder.fields["rope_scaling"]["mscale_all_dim"] == 1.0
  kimi = HFFolder(change_folder(folder, fields={"model_type": "kimi_k2", "aux_loss_alpha": 0.001}))
  assert kimi.model_config() == tiny
  jax.tree.map(np.testing.assert_array_equal, import_policy(kimi.path, tiny), params)
  export_policy(params, tiny, tmp_path / "b", base=kimi)
  fields = json.loads((tmp_path / "b" / "config.json").read_text())
  assert fields["model_type"] == "kimi_k2" and fields["aux_loss_alpha"] == 0.001
  assert fields["architectures"] == ["DeepseekV3ForCausalLM"]
