"""Mistral without a sliding window: 7B since v0.2, Nemo, Small, Large."""

from __future__ import annotations

from typing import Any

from sao_jax.config import ModelConfig, YarnConfig
from sao_jax.huggingface.families import qwen3
from sao_jax.huggingface.families.family import Family
from sao_jax.huggingface.families.fields import Fields
from sao_jax.huggingface.families.rotary_fields import read_rope

DEFAULTS = qwen3.COMMON | {
  "vocab_size": 32_000,
  "hidden_size": 4096,
  "intermediate_size": 14_336,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "head_dim": None,
  "max_position_embeddings": 131_072,
  "rms_norm_eps": 1e-6,
  "sliding_window": 4096,
}


def read(fields: Fields) -> dict[str, Any]:
  """Reads the shape of a Mistral; a window is refused unless the whole context fits into it."""
  shape = qwen3.read_common(fields) | read_rope(fields, yarn=True) | {"num_experts": 0, "qk_norm": False}
  window = fields.take("sliding_window", null=None)
  model = ModelConfig(max_positions=shape["max_positions"], yarn=shape.get("yarn", YarnConfig()))
  if window is not None and window < model.longest_context:
    fields.refuse("sliding_window", window)
  return shape


def write(config: ModelConfig) -> dict[str, Any]:
  """Writes the config.json of a Mistral; without the null it would mean a window."""
  return qwen3.write_common(config) | {"sliding_window": None}


FAMILY = Family(
  model_type="mistral",
  architecture="MistralForCausalLM",
  defaults=DEFAULTS,
  read=read,
  write=write,
  tensors=qwen3.FAMILY.tensors,
)
