"""DeepSeek-V3 and R1 (arXiv 2412.19437), and Kimi K2: latent attention, stretched by YaRN; experts in groups."""

from __future__ import annotations

from typing import Any

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families import glm4_moe, qwen3, qwen3_moe
from sao_jax.huggingface.families.family import Family, matrix, vector
from sao_jax.huggingface.families.fields import Fields
from sao_jax.huggingface.families.rotary_fields import read_rope

DEFAULTS = qwen3.COMMON | {
  "vocab_size": 129_280,
  "hidden_size": 7168,
  "intermediate_size": 18_432,
  "num_hidden_layers": 61,
  "num_attention_heads": 128,
  "num_key_value_heads": 128,
  "head_dim": None,
  "max_position_embeddings": 4096,
  "rms_norm_eps": 1e-6,
  "kv_lora_rank": 512,
  "q_lora_rank": 1536,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "attention_bias": False,
  "rope_interleave": True,
  "moe_intermediate_size": 2048,
  "num_experts_per_tok": 8,
  "n_routed_experts": 256,
  "n_shared_experts": 1,
  "routed_scaling_factor": 2.5,
  "n_group": 8,
  "topk_group": 4,
  "first_k_dense_replace": 3,
  "norm_topk_prob": True,
  "num_mtp_layers": 1,
}
# The fields of latent attention, in config.json and in ModelConfig.
WIDTHS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT = {
  "attention/q_a": matrix("self_attn.q_a_proj.weight"),
  "attention/q_a_norm": vector("self_attn.q_a_layernorm.weight"),
  "attention/q_b": matrix("self_attn.q_b_proj.weight"),
  "attention/kv_a": matrix("self_attn.kv_a_proj_with_mqa.weight"),
  "attention/kv_a_norm": vector("self_attn.kv_a_layernorm.weight"),
  "attention/kv_b": matrix("self_attn.kv_b_proj.weight"),
  "attention/o": matrix("self_attn.o_proj.weight", inputs=2),
}


def read_latent(fields: Fields) -> dict[str, Any]:
  """Reads the fields of latent attention, and those that all our families share."""
  fields.only("attention_bias", False)
  fields.only("rope_interleave", True)
  fields.irrelevant("qk_head_dim", "pretraining_tp")  # a sum of two others; how its matrices were split

  shape = qwen3.read_common(fields)
  if shape["num_kv_heads"] != shape["num_heads"]:
    fields.refuse("num_key_value_heads", shape["num_kv_heads"])
  widths = {name: fields.take(name) for name in WIDTHS}
  return shape | widths | {"head_dim": widths["qk_rope_head_dim"], "qk_norm": False}


def read_head_dim(fields: Fields) -> dict[str, Any]:
  """Refuses a head_dim that is not the width of the rotated part: transformers would rotate so many dimensions."""
  rotated = fields.take("qk_rope_head_dim")
  named = fields.take("head_dim", rotated)
  if named != rotated:
    fields.refuse("head_dim", named)
  return {"head_dim": rotated}


def read(fields: Fields) -> dict[str, Any]:
  """Reads the shape of a DeepSeek-V3."""
  fields.only("moe_layer_freq", 1)
  fields.irrelevant("ep_size", "aux_loss_alpha", "seq_aux")  # of its training
  glm4_moe.read_prediction_layers(fields)
  shape = read_latent(fields) | read_head_dim(fields)
  return shape | read_rope(fields, yarn=True, latent=True) | glm4_moe.read_experts(fields, shape["num_layers"])


def write_latent(config: ModelConfig) -> dict[str, Any]:
  """Writes the fields that `read_latent` reads, and those of the rotary embedding."""
  return qwen3.write_common(config) | {name: getattr(config, name) for name in WIDTHS} | {"attention_bias": False}


def write(config: ModelConfig) -> dict[str, Any]:
  """Writes the config.json of a DeepSeek-V3, without layers for multi-token prediction."""
  return write_latent(config) | glm4_moe.write_experts(config) | {"num_nextn_predict_layers": 0}


FAMILY = Family(
  model_type="deepseek_v3",
  other_types=("kimi_k2",),
  architecture="DeepseekV3ForCausalLM",
  defaults=DEFAULTS,
  read=read,
  write=write,
  tensors=qwen3.EMBEDDINGS | qwen3.NORMS | qwen3.DENSE | qwen3_moe.EXPERTS | glm4_moe.ROUTED | LATENT,
  float32=frozenset({"moe/correction_bias", "moe/router"}),
  beyond_trunk=glm4_moe.prediction_layers,
)
