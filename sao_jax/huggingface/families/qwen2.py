"""Qwen2.5 and its distillates (arXiv 2412.15115, DeepSeek-R1-Distill-Qwen): biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families import glm4_moe, qwen3
from sao_jax.huggingface.families.family import Family
from sao_jax.huggingface.families.fields import Fields
from sao_jax.huggingface.families.rotary_fields import read_rope

DEFAULTS = qwen3.DEFAULTS | {"head_dim": None}
del DEFAULTS["attention_bias"]  # they are always there


def read(fields: Fields) -> dict[str, Any]:
  """Reads the shape of a Qwen2.5."""
  fields.only("use_mrope", False)
  shape = qwen3.read_common(fields)
  qwen3.read_full_attention(fields, shape["num_layers"])
  return shape | read_rope(fields, yarn=True) | {"num_experts": 0, "qk_norm": False, "attention_bias": True}


def write(config: ModelConfig) -> dict[str, Any]:
  """Writes the config.json of a Qwen2.5."""
  return qwen3.write_common(config) | {"use_sliding_window": False}


FAMILY = Family(
  model_type="qwen2",
  architecture="Qwen2ForCausalLM",
  defaults=DEFAULTS,
  read=read,
  write=write,
  tensors=qwen3.FAMILY.tensors | glm4_moe.BIASES,
)
