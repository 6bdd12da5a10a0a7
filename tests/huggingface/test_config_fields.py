"""config.json against the config classes of transformers: every field and default of every family, and random files."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import math
import pathlib
import re

import numpy as np
import pytest
from toys import config_files, parity

from sao_jax.config import ModelConfig
from sao_jax.errors import ConfigError
from sao_jax.huggingface.families import FAMILIES
from sao_jax.huggingface.families.fields import MISSING
from sao_jax.huggingface.families.ignored_fields import IGNORED
from sao_jax.models.attention import attention_kind
from sao_jax.models.attention.latent import score_scale
from sao_jax.models.rope import rope_frequencies, yarn_attention_factor

BY_TYPE = {family.model_type: family for family in FAMILIES}

# Fields that the modules of transformers read, and that change nothing of what is computed from token ids.
READ_WITHOUT_EFFECT = {
  "pad_token_id",  # the row of the embedding that gets no gradient
  "router_aux_loss_coef",  # a loss of the trainer's
  "output_router_logits",
  "_attn_implementation",
}

# What we implement less of than transformers: the only fields of legal files that may be refused. A factor below 1
# stretches nothing, nor does a ramp that falls; where all dimensions are rotated, transformers cannot run a part.
WINDOWS = {"use_sliding_window", "layer_types"}
EVERYWHERE = {"factor", "partial_rotary_factor", "high_freq_factor"}
NOT_IMPLEMENTED = {
  "qwen2": WINDOWS,
  "qwen3": WINDOWS | {"attention_bias"},
  "qwen3_moe": WINDOWS | {"attention_bias", "mlp_only_layers", "decoder_sparse_step"},
  "llama": set(),
  "mistral": {"sliding_window"},
  "seed_oss": set(),
  "glm4_moe": set(),
  "glm_moe_dsa": {"rope_type", "attention_bias"},
  "deepseek_v3": {"attention_bias", "head_dim"},
  "glm4_moe_lite": {"attention_bias", "head_dim", "first_k_dense_replace"},
}


@pytest.fixture(scope="module")
def package():
  return parity.transformers()


def class_of(package, model_type):
  return package.CONFIG_MAPPING[model_type]


def class_fields(package, model_type):
  return {field.name: field for field in dataclasses.fields(class_of(package, model_type))}


@pytest.mark.parametrize("model_type", BY_TYPE)
def test_every_field_is_declared(package, model_type):
  """Taken, irrelevant, or restricted to what is implemented; so are other names for it."""
  declared = BY_TYPE[model_type].declared_fields()
  other_names = class_of(package, model_type).attribute_map
  names = {*class_fields(package, model_type), *other_names, *other_names.values()}
  assert not names - declared.keys()


@pytest.mark.parametrize("model_type", BY_TYPE)
def test_every_default_is_that_of_transformers(package, model_type):
  declared, compared = BY_TYPE[model_type].declared_fields(), 0
  for name, field in class_fields(package, model_type).items():
    if declared[name].kind == "irrelevant":
      continue
    default = declared[name].default
    assert default is not MISSING, name
    assert (None if default == () else default) == field.default, name
    compared += 1
  assert compared > 12


@pytest.mark.parametrize("model_type", BY_TYPE)
def test_no_field_that_a_model_reads_is_irrelevant(model_type):
  """By the text of its module: whatever it reads of the configuration, a file may change."""
  parity.transformers()
  module = importlib.util.find_spec(f"transformers.models.{model_type}.modeling_{model_type}")
  text = pathlib.Path(module.origin).read_text(encoding="utf-8")
  read = set(re.findall(r"\bconfig\.(\w+)\b(?!\()", text)) | set(
    re.findall(r'getattr\((?:self\.)?config, "(\w+)"', text)
  )
  assert {"hidden_size", "rms_norm_eps", "rope_parameters"} <= read
  declared = BY_TYPE[model_type].declared_fields()
  used = {name for name, field in declared.items() if field.kind != "irrelevant"}
  assert not read - used - READ_WITHOUT_EFFECT


def test_whatever_says_how_to_generate_or_to_save_is_ignored(package):
  common = {field.name for field in dataclasses.fields(package.PreTrainedConfig)} - {"is_encoder_decoder"}
  common |= package.GenerationConfig._get_default_generation_params().keys()
  assert not common - set(IGNORED)
  assert len(set(IGNORED)) == len(IGNORED)
  for family in FAMILIES:
    fields = config_files.smallest(class_of(package, family.model_type))
    assert family.model_config(fields | dict.fromkeys(IGNORED, "anything")) == family.model_config(fields)


# Reading by both sides


def ours_of(model_type, fields):
  return BY_TYPE[model_type].model_config(copy.deepcopy(fields))


def theirs_of(package, model_type, fields):
  """Their configuration, the frequencies and factor of its rotary embedding, and the factor on scores of latents.

  An exception of any kind says that the file is illegal.
  """
  config = class_of(package, model_type)(**copy.deepcopy(fields))
  module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
  rotary = getattr(module, type(config).__name__.replace("Config", "RotaryEmbedding"))(config)
  scale = module.yarn_apply_mscale(config.rope_parameters, 1.0) if hasattr(config, "kv_lora_rank") else 1.0
  return config, rotary.inv_freq.numpy(), rotary.attention_scaling, scale


def assert_same(ours, theirs):
  """All that we take from a file is what transformers makes of it."""
  config, frequencies, factor, scale = theirs
  expected = config_files.shape_by_transformers(config)
  assert {name: getattr(ours, name) for name in expected} == expected
  assert not config_files.has_windows(config)
  rotary_dim = attention_kind(ours).rotary_dim(ours)
  found = np.asarray(rope_frequencies(rotary_dim, ours.rope_theta, ours.yarn))
  np.testing.assert_allclose(found, frequencies, rtol=2e-5)
  assert yarn_attention_factor(ours.yarn) == pytest.approx(factor, rel=1e-6)
  if ours.is_latent:
    width = ours.qk_nope_head_dim + ours.qk_rope_head_dim
    assert score_scale(ours) == pytest.approx(scale * width**-0.5, rel=1e-6)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"use_sliding_window": True, "sliding_window": 16}
LEGAL = {
  "no head_dim": ("qwen3_moe", {}),
  "null key-value heads": ("qwen3", {"num_key_value_heads": None}),
  "an ignored rotary factor": ("qwen3", {"partial_rotary_factor": 0.5}),
  "a rotary factor that counts": ("glm4_moe", {"head_dim": 16, "partial_rotary_factor": 0.25}),
  "a null one turns all dimensions": ("glm4_moe", {"head_dim": 16, "partial_rotary_factor": None}),
  "YaRN and a rotary factor": ("glm4_moe", {"head_dim": 16, "rope_scaling": YARN}),
  "no routed_scaling_factor": ("glm_moe_dsa", {}),
  "mlp_layer_types alone": ("glm_moe_dsa", {"mlp_layer_types": ["dense", "sparse"]}),
  "kinds, not the first dense ones": (
    "glm_moe_dsa",
    {"mlp_layer_types": ["dense", "sparse"], "first_k_dense_replace": 2},
  ),
  "YaRN of a card": ("qwen3", {"rope_scaling": YARN}),
  "YaRN without the positions of pretraining": ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
  "YaRN that only scales": ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.5}}),
  "YaRN in the new form": ("qwen3", {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_theta": 5e4}),
  "the old form before the new one": ("qwen3", {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6}}),
  "an empty old form": ("qwen3", {"rope_scaling": {}, "rope_parameters": YARN | {"rope_theta": 1e6}}),
  "positions beside the object": ("qwen3", {"rope_scaling": YARN, "original_max_position_embeddings": 128}),
  "two scales of DeepSeek": ("qwen3", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}),
  "windows behind the last layer": ("qwen3", WINDOW | {"max_window_layers": 2}),
  "windows of no size": ("qwen3_moe", WINDOW | {"sliding_window": None}),
  "sparse layers never come": ("qwen3_moe", {"decoder_sparse_step": 3}),
  "dense layers out of order": ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [1, 0, 7]}),
  "experts by two names": ("qwen3_moe", {"num_experts": 3, "num_local_experts": 5}),
  "experts by three names": ("glm_moe_dsa", {"n_routed_experts": 2, "num_local_experts": 5, "num_experts": 3}),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_files(package, name):
  model_type, changes = LEGAL[name]
  fields = config_files.smallest(class_of(package, model_type)) | changes
  assert_same(ours_of(model_type, fields), theirs_of(package, model_type, fields))


@pytest.mark.parametrize("model_type", BY_TYPE)
def test_random_legal_files_mean_the_same(package, model_type):
  """Fields left out, null, under other names, in old and new forms; refused is only what we implement less of."""
  rng = np.random.default_rng(0)
  accepted, refused = 0, 0
  while accepted < 40:
    fields = config_files.random_file(rng, class_of(package, model_type))
    try:
      theirs = theirs_of(package, model_type, fields)
    except Exception:  # not legal: transformers raises errors of all kinds
      continue
    if not config_files.sound(theirs[0]):
      continue
    try:
      ours = ours_of(model_type, fields)
    except ConfigError as error:
      named = set(re.findall(r"(\w+) = ", error.problem))
      assert named and named <= NOT_IMPLEMENTED[model_type] | EVERYWHERE, (error.problem, fields)
      refused += 1
      assert refused < 400
      continue
    assert_same(ours, theirs)
    accepted += 1


WRONG = ("7", "x", True, False, 0, -1, 3, 0.5, 2.0, math.nan, math.inf, 10**400, None, [], [1], ["x"], {}, {"x": 1})


@pytest.mark.parametrize("model_type", BY_TYPE)
def test_values_of_another_kind_are_refused_by_name(package, model_type):
  """Whatever stands in a field: it means what transformers makes of it, or is refused by its name."""
  base = config_files.smallest(class_of(package, model_type))
  declared = BY_TYPE[model_type].declared_fields()
  names = sorted(name for name, field in declared.items() if field.kind != "irrelevant")
  cases = [(name, {name: value}) for name in names for value in WRONG]
  cases += [
    (key, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0} | {key: value}})
    for key in ("rope_type", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "truncate")
    + ("mscale", "rope_theta", "partial_rotary_factor", "type")
    for value in WRONG
  ]
  ours_of(model_type, base)
  accepted = 0
  for name, change in cases:
    fields = base | change
    try:
      ours = ours_of(model_type, fields)
    except ConfigError as error:
      assert name in error.problem or config_files.follows_from(name, error.problem), (change, error.problem)
      continue
    try:
      theirs = theirs_of(package, model_type, fields)
    except Exception:
      assert config_files.more_lenient(name, change), change
      continue
    assert_same(ours, theirs)
    accepted += 1
  assert accepted > 20


def test_a_model_config_has_no_other_sources():
  """Every field of the shape is compared above, but those that have no counterpart in a config class."""
  compared = set(config_files.NAMES)
  ours = {field.name for field in dataclasses.fields(ModelConfig)}
  assert compared <= ours
