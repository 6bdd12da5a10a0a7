"""GLM-4.7-Flash: a small DeepSeek-V3; its files list the kind of every layer's feed-forward part."""

from __future__ import annotations

import dataclasses
from typing import Any

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families import deepseek_v3, glm4_moe
from sao_jax.huggingface.families.fields import Fields
from sao_jax.huggingface.families.rotary_fields import read_rope

DEFAULTS = deepseek_v3.DEFAULTS | {
  "vocab_size": 154_880,
  "hidden_size": 2048,
  "intermediate_size": 10_240,
  "num_hidden_layers": 47,
  "num_attention_heads": 20,
  "num_key_value_heads": 20,
  "max_position_embeddings": 202_752,
  "rms_norm_eps": 1e-5,
  "q_lora_rank": 768,
  "qk_nope_head_dim": 192,
  "v_head_dim": 256,
  "moe_intermediate_size": 1536,
  "num_experts_per_tok": 4,
  "n_routed_experts": 64,
  "routed_scaling_factor": 1.8,
  "n_group": 1,
  "topk_group": 1,
  "first_k_dense_replace": 1,
  "mlp_layer_types": (),
}


def read(fields: Fields) -> dict[str, Any]:
  """Reads the shape of a GLM-4.7-Flash."""
  fields.only("moe_layer_freq", 1)
  fields.irrelevant("ep_size")
  glm4_moe.read_prediction_layers(fields)
  shape = deepseek_v3.read_latent(fields) | deepseek_v3.read_head_dim(fields)
  shape |= glm4_moe.read_experts(fields, shape["num_layers"])
  rope = read_rope(fields, yarn=True, partial=1.0, latent=True)

  # transformers reads the list, or else makes the first layer a dense one, whatever first_k_dense_replace says.
  num_layers = shape["num_layers"]
  kinds = list(fields.take("mlp_layer_types"))
  if not fields.holds("mlp_layer_types", list):
    kinds = ["dense"] + ["sparse"] * (num_layers - 1)
  dense = kinds.count("dense")
  if kinds != ["dense"] * dense + ["sparse"] * (num_layers - dense):
    fields.refuse("mlp_layer_types", kinds)
  named = fields.take("first_k_dense_replace", dense, least=0)
  if named != dense:
    fields.refuse("first_k_dense_replace", named)
  if rope["rotary_fraction"] != 1.0:  # the rotated part is rotated as a whole
    fields.refuse("partial_rotary_factor", rope["rotary_fraction"])
  return shape | rope | {"num_dense_layers": dense}


def write(config: ModelConfig) -> dict[str, Any]:
  """Writes the config.json of a GLM-4.7-Flash, without layers for multi-token prediction."""
  kinds = ["dense"] * config.num_dense_layers + ["sparse"] * config.num_moe_layers
  return deepseek_v3.write(config) | {"mlp_layer_types": kinds}


FAMILY = dataclasses.replace(
  deepseek_v3.FAMILY,
  model_type="glm4_moe_lite",
  other_types=(),
  architecture="Glm4MoeLiteForCausalLM",
  defaults=DEFAULTS,
  read=read,
  write=write,
)
