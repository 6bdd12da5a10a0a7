"""Seed-OSS: a Llama whose biases of attention, in and out, have a field each. Its dropout is not applied."""

from __future__ import annotations

from typing import Any

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families import llama, qwen3
from sao_jax.huggingface.families.family import Family
from sao_jax.huggingface.families.fields import Fields
from sao_jax.huggingface.families.rotary_fields import read_rope

DEFAULTS = qwen3.COMMON | {
  "attention_dropout": 0.1,
  "residual_dropout": 0.1,
  "vocab_size": 155_136,
  "hidden_size": 4096,
  "intermediate_size": 27_648,
  "num_hidden_layers": 64,
  "num_attention_heads": 80,
  "num_key_value_heads": 8,
  "head_dim": 128,
  "max_position_embeddings": 524_288,
  "rms_norm_eps": 1e-6,
  "attention_bias": True,
  "attention_out_bias": False,
  "mlp_bias": False,
}


def read(fields: Fields) -> dict[str, Any]:
  """Reads the shape of a Seed-OSS."""
  fields.only("mlp_bias", False)
  fields.irrelevant("pretraining_tp")
  fields.take("residual_dropout", least=0)
  biases = {name: fields.take(name) for name in ("attention_bias", "attention_out_bias")}
  shape = qwen3.read_common(fields, dropout=True)
  return shape | read_rope(fields, yarn=True) | {"num_experts": 0, "qk_norm": False} | biases


def write(config: ModelConfig) -> dict[str, Any]:
  """Writes the config.json of a Seed-OSS, without dropout."""
  biases = {"attention_bias": config.attention_bias, "attention_out_bias": config.attention_out_bias}
  return qwen3.write_common(config) | biases | {"mlp_bias": False, "residual_dropout": 0.0}


FAMILY = Family(
  model_type="seed_oss",
  architecture="SeedOssForCausalLM",
  defaults=DEFAULTS,
  read=read,
  write=write,
  tensors=qwen3.FAMILY.tensors | llama.BIASES,
)
