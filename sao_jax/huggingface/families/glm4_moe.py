"""GLM-4.5 and GLM-4.5-Air (arXiv 2508.06471): sigmoid router, group-limited; a shared expert; leading dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families import qwen3, qwen3_moe
from sao_jax.huggingface.families.family import Family, matrix, vector
from sao_jax.huggingface.families.fields import Fields
from sao_jax.huggingface.families.rotary_fields import read_rope

DEFAULTS = qwen3.COMMON | {
  "vocab_size": 151_552,
  "hidden_size": 4096,
  "intermediate_size": 10_944,
  "num_hidden_layers": 46,
  "num_attention_heads": 96,
  "num_key_value_heads": 8,
  "head_dim": None,
  "max_position_embeddings": 131_072,
  "rms_norm_eps": 1e-5,
  "attention_bias": False,
  "use_qk_norm": False,
  "moe_intermediate_size": 1408,
  "num_experts_per_tok": 8,
  "n_routed_experts": 128,
  "n_shared_experts": 1,
  "routed_scaling_factor": 1.0,
  "n_group": 1,
  "topk_group": 1,
  "first_k_dense_replace": 1,
  "norm_topk_prob": True,
  "num_mtp_layers": 1,
}
BIASES = {
  "attention/q_bias": vector("self_attn.q_proj.bias"),
  "attention/k_bias": vector("self_attn.k_proj.bias"),
  "attention/v_bias": vector("self_attn.v_proj.bias"),
}
ROUTED = {
  "moe/correction_bias": vector("mlp.gate.e_score_correction_bias"),
  "moe/shared/gate": matrix("mlp.shared_experts.gate_proj.weight"),
  "moe/shared/up": matrix("mlp.shared_experts.up_proj.weight"),
  "moe/shared/down": matrix("mlp.shared_experts.down_proj.weight"),
}


def read_experts(fields: Fields, num_layers: int, aliases: tuple[str, ...] = ("num_local_experts",)) -> dict[str, Any]:
  """Reads the experts of GLM-4.5 and its successors; `aliases` are further names of n_routed_experts."""
  fields.only("scoring_func", "sigmoid")
  fields.only("topk_method", "noaux_tc")

  # The shared experts are one feed-forward layer to us, of their joint width.
  width = fields.take("moe_intermediate_size")
  return {
    "num_experts": fields.take("n_routed_experts", aliases=aliases),
    "num_experts_per_token": fields.take("num_experts_per_tok"),
    "d_ff_expert": width,
    "d_ff_shared": width * fields.take("n_shared_experts", least=0),
    "num_dense_layers": min(fields.take("first_k_dense_replace", least=0), num_layers),
    "renormalize_router": fields.take("norm_topk_prob"),
    "router": "sigmoid",
    "num_expert_groups": fields.take("n_group"),
    "num_groups_per_token": fields.take("topk_group"),
    "routed_scaling": fields.take("routed_scaling_factor"),
  }


def write_experts(config: ModelConfig) -> dict[str, Any]:
  """Writes the fields that `read_experts` reads."""
  return {
    "n_routed_experts": config.num_experts,
    "num_experts_per_tok": config.num_experts_per_token,
    "moe_intermediate_size": config.d_ff_expert,
    "n_shared_experts": config.d_ff_shared // config.d_ff_expert,
    "first_k_dense_replace": config.num_dense_layers,
    "norm_topk_prob": config.renormalize_router,
    "n_group": config.num_expert_groups,
    "topk_group": config.num_groups_per_token,
    "routed_scaling_factor": config.routed_scaling,
  }


def read(fields: Fields) -> dict[str, Any]:
  """Reads the shape of a GLM-4.5."""
  read_prediction_layers(fields)
  shape = qwen3.read_common(fields)
  shape |= read_rope(fields, yarn=True, partial=0.5) | read_experts(fields, shape["num_layers"])
  return shape | {"attention_bias": fields.take("attention_bias"), "qk_norm": fields.take("use_qk_norm")}


def write(config: ModelConfig) -> dict[str, Any]:
  """Writes the config.json of a GLM-4.5, without layers for multi-token prediction."""
  return (
    qwen3.write_common(config)
    | write_experts(config)
    | {
      "attention_bias": config.attention_bias,
      "use_qk_norm": config.qk_norm,
      "partial_rotary_factor": config.rotary_fraction,
      "num_nextn_predict_layers": 0,
    }
  )


def read_prediction_layers(fields: Fields) -> None:
  """Checks the number of multi-token-prediction layers, which are no part of the model: see `prediction_layers`."""
  fields.take("num_mtp_layers", null=0, least=0, aliases=("num_nextn_predict_layers",))


def prediction_layers(fields: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the prefixes of the multi-token-prediction layers, which follow the layers of the model.

  A config.json that leaves their number out means one layer, as in all published folders; null means none.
  """
  first, number = fields["num_hidden_layers"], fields.get("num_nextn_predict_layers", fields["num_mtp_layers"]) or 0
  return tuple(f"model.layers.{first + i}." for i in range(number))


FAMILY = Family(
  model_type="glm4_moe",
  architecture="Glm4MoeForCausalLM",
  defaults=DEFAULTS,
  read=read,
  write=write,
  tensors=qwen3.FAMILY.tensors | qwen3_moe.EXPERTS | BIASES | ROUTED,
  float32=frozenset({"moe/correction_bias", "moe/router"}),
  beyond_trunk=prediction_layers,
)
