"""config.json of GLM-5 and GLM-5.2: read, written back, and refused by name where it says more; which layers index."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from toys.glm5_toy import TINY
from toys.hf_toy import change_folder, make_folder

from sao_jax.config import ModelConfig
from sao_jax.errors import ConfigError
from sao_jax.huggingface.families import family_of_model, from_hf_config, glm_moe_dsa
from sao_jax.huggingface.folder import HFFolder
from sao_jax.huggingface.load import import_policy
from sao_jax.huggingface.published import PUBLISHED, kv_bytes_per_token
from sao_jax.models.transformer import param_specs

# As published: https://huggingface.co/zai-org/GLM-5/blob/main/config.json and zai-org/GLM-5.2.
GLM5 = {
  "architectures": ["GlmMoeDsaForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "dtype": "bfloat16",
  "eos_token_id": [154820, 154827, 154829],
  "ep_size": 1,
  "first_k_dense_replace": 3,
  "head_dim": 64,
  "hidden_act": "silu",
  "hidden_size": 6144,
  "index_head_dim": 128,
  "index_n_heads": 32,
  "index_topk": 2048,
  "indexer_rope_interleave": True,
  "initializer_range": 0.02,
  "intermediate_size": 12288,
  "kv_lora_rank": 512,
  "max_position_embeddings": 202752,
  "model_type": "glm_moe_dsa",
  "moe_intermediate_size": 2048,
  "moe_layer_freq": 1,
  "n_group": 1,
  "n_routed_experts": 256,
  "n_shared_experts": 1,
  "norm_topk_prob": True,
  "num_attention_heads": 64,
  "num_experts_per_tok": 8,
  "num_hidden_layers": 78,
  "num_key_value_heads": 64,
  "num_nextn_predict_layers": 1,
  "pad_token_id": 154820,
  "pretraining_tp": 1,
  "q_lora_rank": 2048,
  "qk_head_dim": 256,
  "qk_nope_head_dim": 192,
  "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-05,
  "rope_interleave": True,
  "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
  "routed_scaling_factor": 2.5,
  "scoring_func": "sigmoid",
  "tie_word_embeddings": False,
  "topk_group": 1,
  "topk_method": "noaux_tc",
  "transformers_version": "5.0.2.dev0",
  "use_cache": True,
  "v_head_dim": 256,
  "vocab_size": 154880,
}
TYPES = (["full"] * 3 + ["shared"] * 3 + (["full"] + ["shared"] * 3) * 18)[:78]
GLM52 = GLM5 | {
  "head_dim": 192,
  "index_share_for_mtp_iteration": True,
  "index_skip_topk_offset": 3,
  "index_topk_freq": 4,
  "index_topk_pattern": None,
  "indexer_types": TYPES,
  "max_position_embeddings": 1048576,
  "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
  "moe_router_dtype": "float32",
  "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}


@pytest.mark.parametrize("name, fields", [("GLM-5", GLM5), ("GLM-5.2", GLM52)])
def test_published_folders(name, fields):
  config = from_hf_config(fields, ModelConfig(dtype="bfloat16"))
  assert config == PUBLISHED[name].model
  assert glm_moe_dsa.FAMILY.prefixes_beyond_trunk(fields) == ("model.layers.78.",)


def test_which_layers_of_glm_5_2_have_an_indexer():
  model = PUBLISHED["GLM-5.2"].model
  layers = glm_moe_dsa.layers(model, "indexer_layers/q")
  assert layers == (0, 1, 2, *range(6, 78, 4)) and len(layers) == 21
  assert param_specs(model)["indexer_layers"]["q"].shape == (21, 2048, 32, 128)
  table = glm_moe_dsa.FAMILY.tensor_table(model, param_specs(model))
  assert table["indexer_layers/k"].name_at((3,)) == "model.layers.6.self_attn.indexer.wk.weight"


def test_cache_size():
  """576 numbers per layer and 128 per indexer, two bytes each."""
  assert kv_bytes_per_token(PUBLISHED["GLM-5"].model) == 2 * 78 * (576 + 128)
  assert kv_bytes_per_token(PUBLISHED["GLM-5.2"].model) == 2 * (78 * 576 + 21 * 128)


def test_the_kinds_of_layers_in_all_forms():
  without = {name: value for name, value in GLM52.items() if name != "indexer_types"}
  assert from_hf_config(without) == from_hf_config(GLM52)  # by the rhythm
  letters = without | {"index_topk_pattern": "".join(kind[0].upper() for kind in TYPES), "index_topk_freq": 7}
  assert from_hf_config(letters) == from_hf_config(GLM52)
  assert from_hf_config(GLM5 | {"indexer_types": ["full"] * 78}) == from_hf_config(GLM5)
  assert from_hf_config(GLM5 | {"layer_types": ["indexed_attention"] * 78}) == from_hf_config(GLM5)


REFUSED = {
  "half-split pairs": ({"indexer_rope_interleave": False}, "indexer_rope_interleave = False"),
  "bias": ({"attention_bias": True}, "attention_bias = True"),
  "key-value heads": ({"num_key_value_heads": 8}, "num_key_value_heads = 8"),
  "all positions": ({"index_topk": 0}, "index_topk = 0"),
  "dense layers in the middle": ({"mlp_layer_types": ["dense", "sparse", "dense"] * 26}, "mlp_layer_types"),
  "shared first": ({"indexer_types": ["shared"] * 78}, "indexer_types"),
  "another kind": ({"indexer_types": ["full"] * 77 + ["none"]}, "indexer_types"),
  "too few kinds": ({"index_topk_pattern": "FS"}, "indexer_types"),
  "linear attention": ({"layer_types": ["linear_attention"] * 78}, "layer_types"),
  "router in bf16": ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype = 'bfloat16'"),
  "YaRN": ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'"),
  "pooled keys": ({"index_kpool": 4}, "index_kpool is not known"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(name):
  changes, problem = REFUSED[name]
  with pytest.raises(ConfigError) as error:
    from_hf_config(GLM5 | changes)
  assert problem in error.value.problem


def test_written_and_read_again(tmp_path):
  """Out and in: the same shape and the same bits; the prediction layer is left alone; no indexer is out of place."""
  assert family_of_model(TINY) is glm_moe_dsa.FAMILY
  assert family_of_model(dataclasses.replace(TINY, indexer_types=())) is glm_moe_dsa.FAMILY
  folder, params = make_folder(tmp_path / "folder", TINY)
  assert folder.model_config() == TINY
  indexed = {name for name in folder.tensors if ".indexer." in name}
  assert len(indexed) == 10 and all(name.startswith(("model.layers.0.", "model.layers.2.")) for name in indexed)
  extra = {"model.layers.4.eh_proj.weight": np.ones((3, 5), np.float32)}
  changed = change_folder(folder, tensors=extra, fields={"num_nextn_predict_layers": 1})
  jax.tree.map(np.testing.assert_array_equal, import_policy(changed, TINY), params)

  misplaced = {"model.layers.1.self_attn.indexer.wk.weight": np.ones((7, 16), np.float32)}
  wrong = change_folder(HFFolder(changed), tensors=misplaced, remove=["model.layers.2.self_attn.indexer.wk.weight"])
  with pytest.raises(ConfigError) as error:
    import_policy(wrong, TINY)
  assert "model.layers.1.self_attn.indexer.wk.weight [7, 16] is not part of the model" in error.value.problem
  assert "model.layers.2.self_attn.indexer.wk.weight [7, 16] is missing" in error.value.problem


def test_the_router_stays_in_fp32():
  table = glm_moe_dsa.FAMILY.tensor_table(TINY, param_specs(TINY))
  assert {name for name, tensor in table.items() if tensor.keep_float32} == {
    "moe_layers/moe/router",
    "moe_layers/moe/correction_bias",
  }
