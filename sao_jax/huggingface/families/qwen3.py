"""Qwen3, dense (arXiv 2505.09388): grouped-query attention with q/k norm, SwiGLU."""

from __future__ import annotations

from typing import Any

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families.family import Family, matrix, unchanged, vector
from sao_jax.huggingface.families.fields import Fields
from sao_jax.huggingface.families.rotary_fields import read_rope, write_rope

# config.json -> ModelConfig, with the same value; so in all our families.
SAME = {
  "vocab_size": "vocab_size",
  "hidden_size": "d_model",
  "intermediate_size": "d_ff",
  "num_hidden_layers": "num_layers",
  "num_attention_heads": "num_heads",
  "max_position_embeddings": "max_positions",
  "rms_norm_eps": "rms_norm_eps",
  "initializer_range": "initializer_range",
  "tie_word_embeddings": "tie_embeddings",
}
# The defaults that our families share.
COMMON = {
  "hidden_act": "silu",
  "attention_dropout": 0.0,
  "initializer_range": 0.02,
  "tie_word_embeddings": False,
}
DEFAULTS = COMMON | {
  "vocab_size": 151_936,
  "hidden_size": 4096,
  "intermediate_size": 22_016,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "num_key_value_heads": 32,
  "head_dim": 128,
  "max_position_embeddings": 32_768,
  "rms_norm_eps": 1e-6,
  "attention_bias": False,
  "use_sliding_window": False,
  "sliding_window": 4096,
  "max_window_layers": 28,
  "layer_types": (),
}

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


def read_common(fields: Fields, dropout: bool = False) -> dict[str, Any]:
  """Reads the fields that all our families share.

  Args:
    fields: the fields of a config.json.
    dropout: True if it may name a rate of dropout, which other trainers apply and nothing here does.
  """
  fields.only("hidden_act", "silu")
  if dropout:
    fields.take("attention_dropout", least=0)
  else:
    fields.only("attention_dropout", 0.0)
  shape = {ours: fields.take(theirs) for theirs, ours in SAME.items()}

  # Null, and no default, mean what follows from the heads.
  derived = shape["d_model"] // shape["num_heads"]
  heads = fields.take("num_key_value_heads", kind=int, null=None) or shape["num_heads"]
  return shape | {"num_kv_heads": heads, "head_dim": fields.take("head_dim", kind=int, null=None) or derived}


def read_full_attention(fields: Fields, num_layers: int) -> None:
  """Refuses layers with sliding windows; the sizes of windows that no layer uses do not matter."""
  used, window = fields.take("use_sliding_window"), fields.take("sliding_window", null=None, least=0)
  first = fields.take("max_window_layers", least=0)
  kinds = fields.take("layer_types")
  if kinds and kinds != ("full_attention",) * num_layers:
    fields.refuse("layer_types", list(kinds))
  if not kinds and used and window is not None and first < num_layers:
    fields.refuse("use_sliding_window", used)


def write_common(config: ModelConfig) -> dict[str, Any]:
  """Writes the fields of `read_common` and of `read_rope`."""
  written = {theirs: getattr(config, ours) for theirs, ours in SAME.items()}
  written |= {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
  return written | write_rope(config) | {"hidden_act": "silu", "attention_dropout": 0.0}


def read(fields: Fields) -> dict[str, Any]:
  """Reads the shape of a dense Qwen3."""
  fields.only("attention_bias", False)
  shape = read_common(fields)
  read_full_attention(fields, shape["num_layers"])
  return shape | read_rope(fields, yarn=True) | {"num_experts": 0, "qk_norm": True}


def write(config: ModelConfig) -> dict[str, Any]:
  """Writes the config.json of a dense Qwen3."""
  return write_common(config) | {"attention_bias": False, "use_sliding_window": False}


FAMILY = Family(
  model_type="qwen3",
  architecture="Qwen3ForCausalLM",
  defaults=DEFAULTS,
  read=read,
  write=write,
  tensors=EMBEDDINGS | NORMS | ATTENTION | DENSE,
)
