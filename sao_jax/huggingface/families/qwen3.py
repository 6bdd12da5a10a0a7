"""Qwen3, dense (arXiv 2505.09388): grouped-query attention with q/k norm, SwiGLU."""

from __future__ import annotations

from typing import Any

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families.family import Family, matrix, unchanged, vector
from sao_jax.huggingface.families.fields import Fields, read_rope, write_yarn

# config.json -> ModelConfig, with the same value.
SAME = {
  "vocab_size": "vocab_size",
  "hidden_size": "d_model",
  "intermediate_size": "d_ff",
  "num_hidden_layers": "num_layers",
  "num_attention_heads": "num_heads",
  "num_key_value_heads": "num_kv_heads",
  "head_dim": "head_dim",
  "max_position_embeddings": "max_positions",
  "rms_norm_eps": "rms_norm_eps",
}
# The same, for fields that a folder may leave out: config.json -> (ModelConfig, default).
DEFAULTS = {"initializer_range": ("initializer_range", 0.02), "tie_word_embeddings": ("tie_embeddings", False)}

EMBEDDINGS = {
  "embed": unchanged("model.embed_tokens.weight"),
  "final_norm": vector("model.norm.weight"),
  "head": matrix("lm_head.weight"),
}
NORMS = {"attention_norm": vector("input_layernorm.weight"), "mlp_norm": vector("post_attention_layernorm.weight")}
ATTENTION = {
  "attention/q": matrix("self_attn.q_proj.weight"),
  "attention/k": matrix("self_attn.k_proj.weight"),
  "attention/v": matrix("self_attn.v_proj.weight"),
  "attention/o": matrix("self_attn.o_proj.weight", inputs=2),
  "attention/q_norm": vector("self_attn.q_norm.weight"),
  "attention/k_norm": vector("self_attn.k_norm.weight"),
}
DENSE = {
  "mlp/gate": matrix("mlp.gate_proj.weight"),
  "mlp/up": matrix("mlp.up_proj.weight"),
  "mlp/down": matrix("mlp.down_proj.weight"),
}


def read_common(fields: Fields) -> dict[str, Any]:
  """Reads the fields that all our families share."""
  fields.only("hidden_act", "silu")
  fields.only("attention_dropout", 0, 0.0)
  same = {ours: fields.take(theirs) for theirs, ours in SAME.items()}
  return same | {ours: fields.take(theirs, default) for theirs, (ours, default) in DEFAULTS.items()}


def read_full_attention(fields: Fields) -> None:
  """Refuses sliding windows; the sizes of windows that are not used do not matter."""
  fields.only("use_sliding_window", False)
  fields.irrelevant("sliding_window", "max_window_layers")
  kinds = fields.take("layer_types", ())
  if set(kinds) - {"full_attention"}:
    fields.refuse("layer_types", kinds)


def write_common(config: ModelConfig) -> dict[str, Any]:
  """Writes the fields of `read_common`, and rope_theta and rope_scaling."""
  written = {theirs: getattr(config, ours) for theirs, ours in SAME.items()}
  written |= {theirs: getattr(config, ours) for theirs, (ours, _) in DEFAULTS.items()}
  rope = {"rope_theta": config.rope_theta, "rope_scaling": write_yarn(config.yarn)}
  return written | rope | {"hidden_act": "silu", "attention_dropout": 0.0}


def read(fields: Fields) -> dict[str, Any]:
  """Reads the shape of a dense Qwen3."""
  fields.only("attention_bias", False)
  read_full_attention(fields)
  return read_common(fields) | read_rope(fields, yarn=True) | {"num_experts": 0, "qk_norm": True}


def write(config: ModelConfig) -> dict[str, Any]:
  """Writes the config.json of a dense Qwen3."""
  return write_common(config) | {"attention_bias": False, "use_sliding_window": False}


FAMILY = Family(
  model_type="qwen3",
  architecture="Qwen3ForCausalLM",
  read=read,
  write=write,
  tensors=EMBEDDINGS | NORMS | ATTENTION | DENSE,
)
