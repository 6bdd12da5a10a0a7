"""config.json of the families: read in both of its forms, written back, and refused by name where it says more."""

from __future__ import annotations

import dataclasses

import pytest

from sao_jax.config import ModelConfig, YarnConfig
from sao_jax.errors import ConfigError
from sao_jax.huggingface.families import FAMILIES, family_of_fields, family_of_model, from_hf_config
from sao_jax.huggingface.families.family import SHAPE, shape_of
from sao_jax.huggingface.published import PUBLISHED, active_params, kv_bytes_per_token, size_table, total_params

# As published: https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json and so on.
QWEN3 = {
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 1024,
  "initializer_range": 0.02,
  "intermediate_size": 3072,
  "max_position_embeddings": 40960,
  "max_window_layers": 28,
  "model_type": "qwen3",
  "num_attention_heads": 16,
  "num_hidden_layers": 28,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": None,
  "tie_word_embeddings": True,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.51.0",
  "use_cache": True,
  "use_sliding_window": False,
  "vocab_size": 151936,
}
QWEN3_MOE = QWEN3 | {
  "architectures": ["Qwen3MoeForCausalLM"],
  "decoder_sparse_step": 1,
  "hidden_size": 2048,
  "intermediate_size": 6144,
  "max_window_layers": 48,
  "mlp_only_layers": [],
  "model_type": "qwen3_moe",
  "moe_intermediate_size": 768,
  "norm_topk_prob": True,
  "num_attention_heads": 32,
  "num_experts": 128,
  "num_experts_per_tok": 8,
  "num_hidden_layers": 48,
  "num_key_value_heads": 4,
  "output_router_logits": False,
  "router_aux_loss_coef": 0.001,
  "tie_word_embeddings": False,
}
GLM = {
  "architectures": ["Glm4MoeForCausalLM"],
  "attention_bias": True,
  "attention_dropout": 0.0,
  "eos_token_id": [151329, 151336, 151338],
  "first_k_dense_replace": 1,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 10944,
  "max_position_embeddings": 131072,
  "model_type": "glm4_moe",
  "moe_intermediate_size": 1408,
  "n_group": 1,
  "n_routed_experts": 128,
  "n_shared_experts": 1,
  "norm_topk_prob": True,
  "num_attention_heads": 96,
  "num_experts_per_tok": 8,
  "num_hidden_layers": 46,
  "num_key_value_heads": 8,
  "num_nextn_predict_layers": 1,
  "pad_token_id": 151329,
  "partial_rotary_factor": 0.5,
  "rms_norm_eps": 1e-05,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "routed_scaling_factor": 1.0,
  "tie_word_embeddings": False,
  "topk_group": 1,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.54.0",
  "use_cache": True,
  "use_qk_norm": False,
  "vocab_size": 151552,
}
FOLDERS = {"Qwen3-0.6B": QWEN3, "Qwen3-30B-A3B": QWEN3_MOE, "GLM-4.5-Air": GLM}


def replaced(fields, **changes):
  return {name: value for name, value in (fields | changes).items() if value is not ...}


# The fields of ModelConfig that a folder does not decide.
CHOICES_OF_A_RUN = ("dtype", "param_dtype", "remat", "moe_implementation", "lora", "checkpoint")


def test_every_field_of_a_model_is_the_folders_or_the_runs():
  """A field in neither list would never be compared with a folder; a run's choice in SHAPE would be overwritten."""
  assert sorted(SHAPE + CHOICES_OF_A_RUN) == sorted(field.name for field in dataclasses.fields(ModelConfig))


def test_the_shape_of_a_dense_model_does_not_depend_on_fields_of_experts():
  """And that of a model with experts does."""
  changed = {"num_experts_per_token": 5, "d_ff_expert": 7, "d_ff_shared": 3, "num_dense_layers": 1}
  changed |= {"renormalize_router": False, "router": "sigmoid", "num_expert_groups": 2, "num_groups_per_token": 2}
  changed |= {"routed_scaling": 2.0}
  assert shape_of(ModelConfig(**changed)) == shape_of(ModelConfig())
  shape, default = shape_of(ModelConfig(num_experts=8, **changed)), shape_of(ModelConfig(num_experts=8))
  assert {name for name in SHAPE if shape[name] != default[name]} == changed.keys()


@pytest.mark.parametrize("name", FOLDERS)
def test_published_folders(name):
  """The shape is the folder's; what a run chooses stays."""
  ours = dataclasses.replace(ModelConfig(), dtype="bfloat16", remat="full", checkpoint="x")
  config = from_hf_config(FOLDERS[name], ours)
  assert config == dataclasses.replace(PUBLISHED[name].model, remat="full", checkpoint="x")


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes(name):
  """Within 1 % of the published total; the table is made of the same numbers."""
  published = PUBLISHED[name]
  total, active = total_params(published.model) / 1e9, active_params(published.model) / 1e9
  assert total == pytest.approx(published.total, rel=0.01)
  embeddings = 2 * published.model.vocab_size * published.model.d_model / 1e9  # some count them as active, some do not
  assert published.active * 0.98 <= active <= published.active * 1.02 + embeddings
  assert f"| {name} | {total:.2f} | {active:.2f} |" in size_table()


def test_cache_size():
  """Qwen3-30B-A3B: 48 layers of 4 heads of 128, keys and values, two bytes each."""
  model = PUBLISHED["Qwen3-30B-A3B"].model
  assert kv_bytes_per_token(model) == 48 * 4 * 128 * 2 * 2
  assert kv_bytes_per_token(model, "float32") == 2 * kv_bytes_per_token(model)


@pytest.mark.parametrize("number, layers", [(..., [46]), (None, []), (0, []), (1, [46]), (2, [46, 47])])
def test_layers_that_predict_further_tokens(number, layers):
  """Null is none; without the field there is one, as published."""
  fields = replaced(GLM, num_nextn_predict_layers=number)
  assert from_hf_config(fields) == from_hf_config(GLM)
  assert family_of_fields(fields).prefixes_beyond_trunk(fields) == tuple(f"model.layers.{layer}." for layer in layers)


@pytest.mark.parametrize("name", PUBLISHED)
def test_written_and_read_again(name):
  model = PUBLISHED[name].model
  family = family_of_model(model)
  assert family.model_config(family.write(model), ModelConfig(dtype="bfloat16")) == model


def test_models_of_our_own_have_a_family():
  """The shape of the quickstart is that of a Qwen3-MoE, with leading dense layers too; others are refused, with why."""
  moe = ModelConfig(num_experts=4, num_layers=3, num_dense_layers=1)
  assert family_of_model(moe).model_type == "qwen3_moe"
  assert family_of_model(ModelConfig()).model_type == "qwen3"
  assert family_of_model(ModelConfig(d_ff_expert=7, num_dense_layers=1)).model_type == "qwen3"  # unused when dense
  with pytest.raises(ConfigError, match="rotary_fraction is 0.5, not 1.0") as error:
    family_of_model(ModelConfig(rotary_fraction=0.5))
  assert all(family.model_type in error.value.problem for family in FAMILIES)


def test_the_form_of_transformers_5():
  """rope_parameters, num_local_experts, layer_types."""
  fields = replaced(QWEN3_MOE, rope_theta=..., rope_scaling=..., num_experts=..., num_local_experts=128)
  fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
  assert from_hf_config(fields) == from_hf_config(QWEN3_MOE)
  glm = replaced(GLM, rope_theta=..., partial_rotary_factor=...)
  glm["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
  assert from_hf_config(glm) == from_hf_config(GLM)
  assert from_hf_config(replaced(QWEN3, layer_types=["full_attention"] * 28)) == from_hf_config(QWEN3)


def test_fields_of_tools_change_nothing():
  tools = {"unsloth_version": "2026.1", "auto_map": {}, "id2label": {"0": "a"}, "num_labels": 1, "temperature": 0.6}
  for fields in FOLDERS.values():
    assert from_hf_config(fields | tools) == from_hf_config(fields)


def test_fields_that_say_what_a_family_does_anyway():
  coder = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}
  assert from_hf_config(QWEN3_MOE | coder) == from_hf_config(QWEN3_MOE)
  for name, value in {"use_qk_norm": False, "qkv_bias": True, "shared_expert_intermediate_size": 64}.items():
    with pytest.raises(ConfigError, match=f"{name} = {value} is not implemented"):
      from_hf_config(QWEN3_MOE | {name: value})


def test_a_context_may_be_as_long_as_yarn_makes_it():
  """The card of Qwen3: 40,960 positions in the file, 32,768 times four by YaRN."""
  card = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
  model = from_hf_config(QWEN3 | {"rope_scaling": card})
  assert (model.max_positions, model.longest_context) == (40_960, 131_072)
  assert from_hf_config(QWEN3).longest_context == 40_960


def test_yarn():
  scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
  config = from_hf_config(QWEN3 | {"rope_scaling": scaling})
  assert config.yarn == YarnConfig(factor=4.0, original_positions=32768)
  family = family_of_model(config)
  assert family.model_config(family.write(config)) == config
  old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
  assert from_hf_config(QWEN3 | {"rope_scaling": old}) == config


REFUSED = {
  "sliding window": (
    QWEN3,
    {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 27},
    "use_sliding_window = True",
  ),
  "sliding layers": (QWEN3, {"layer_types": ["sliding_attention"] * 28}, "layer_types"),
  "activation": (QWEN3, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
  "attention bias": (QWEN3, {"attention_bias": True}, "attention_bias = True"),
  "dropout": (QWEN3, {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
  "linear scaling": (QWEN3, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type = 'linear'"),
  "a detail of YaRN": (
    QWEN3,
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 9, "ramp": 1.0}},
    "rope_scaling.ramp is not known",
  ),
  "every other layer": (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
  "dense layers in the middle": (QWEN3_MOE, {"mlp_only_layers": [3]}, "mlp_only_layers = [3]"),
  "no experts": (GLM, {"n_routed_experts": 0}, "n_routed_experts = 0"),
  "softmax": (GLM, {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
  "unknown": (QWEN3, {"layer_scale": 2.0}, "layer_scale is not known"),
  "a string for an object": (QWEN3, {"rope_scaling": "yarn"}, "rope_scaling = 'yarn' is not an object"),
  "a string for a number": (QWEN3, {"head_dim": "128"}, "head_dim = '128' is not a whole number"),
  "true for a number": (QWEN3, {"num_hidden_layers": True}, "num_hidden_layers = True is not a whole number"),
  "a number for false": (QWEN3, {"tie_word_embeddings": 0}, "tie_word_embeddings = 0 is not true or false"),
  "no number": (QWEN3, {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan is not a finite number"),
  "less than none": (GLM, {"n_shared_experts": -1}, "n_shared_experts = -1 is not at least 0"),
  "a string for a list": (QWEN3_MOE, {"mlp_only_layers": "0"}, "mlp_only_layers = '0' is not a list"),
  "a list of strings": (
    QWEN3_MOE,
    {"mlp_only_layers": ["0"]},
    "mlp_only_layers = ['0'] is not a list of whole numbers",
  ),
  "null": (QWEN3, {"hidden_size": None}, "hidden_size = None is not a whole number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(name):
  fields, changes, problem = REFUSED[name]
  with pytest.raises(ConfigError) as error:
    from_hf_config(replaced(fields, **changes))
  assert problem in error.value.problem and error.value.remedy


def test_all_problems_at_once():
  with pytest.raises(ConfigError) as error:
    from_hf_config(replaced(QWEN3, hidden_act="relu", window=1, vocab_size="9"))
  assert all(word in error.value.problem for word in ("hidden_act = 'relu'", "window is not known", "vocab_size"))


def test_unknown_model_type():
  with pytest.raises(ConfigError, match="'gemma3' is not implemented") as error:
    family_of_fields({"model_type": "gemma3"})
  assert all(name in error.value.remedy for name in ("qwen3", "llama", "kimi_k2"))
