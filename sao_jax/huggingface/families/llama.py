"""Llama 3 (arXiv 2407.21783): grouped-query attention, SwiGLU; since 3.1 with rotary frequencies that are stretched."""

from __future__ import annotations

from typing import Any

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families import glm4_moe, qwen3
from sao_jax.huggingface.families.family import Family, vector
from sao_jax.huggingface.families.fields import Fields
from sao_jax.huggingface.families.rotary_fields import read_rope

DEFAULTS = qwen3.COMMON | {
  "vocab_size": 32_000,
  "hidden_size": 4096,
  "intermediate_size": 11_008,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "num_key_value_heads": None,
  "head_dim": None,
  "max_position_embeddings": 2048,
  "rms_norm_eps": 1e-6,
  "attention_bias": False,
  "mlp_bias": False,
}
BIASES = glm4_moe.BIASES | {"attention/o_bias": vector("self_attn.o_proj.bias")}


def read(fields: Fields) -> dict[str, Any]:
  """Reads the shape of a Llama; one field says if all four projections of attention have biases."""
  fields.only("mlp_bias", False)
  fields.irrelevant("pretraining_tp")
  shape, bias = qwen3.read_common(fields), fields.take("attention_bias")
  if shape["initializer_range"] > 1.0:  # transformers refuses it, of this family only
    fields.refuse("initializer_range", shape["initializer_range"])
  biases = {"attention_bias": bias, "attention_out_bias": bias}
  return shape | read_rope(fields, yarn=True) | {"num_experts": 0, "qk_norm": False} | biases


def write(config: ModelConfig) -> dict[str, Any]:
  """Writes the config.json of a Llama."""
  return qwen3.write_common(config) | {"attention_bias": config.attention_bias, "mlp_bias": False}


FAMILY = Family(
  model_type="llama",
  architecture="LlamaForCausalLM",
  defaults=DEFAULTS,
  read=read,
  write=write,
  tensors=qwen3.FAMILY.tensors | BIASES,
)
