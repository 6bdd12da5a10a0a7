"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with routed experts, a softmax over all of them, and no shared one."""

from __future__ import annotations

from typing import Any

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families import qwen3
from sao_jax.huggingface.families.family import Family, matrix
from sao_jax.huggingface.families.fields import Fields
from sao_jax.huggingface.families.rotary_fields import read_rope

DEFAULTS = qwen3.COMMON | {
  "vocab_size": 151_936,
  "hidden_size": 2048,
  "intermediate_size": 6144,
  "num_hidden_layers": 24,
  "num_attention_heads": 32,
  "num_key_value_heads": 4,
  "head_dim": None,
  "max_position_embeddings": 32_768,
  "rms_norm_eps": 1e-6,
  "attention_bias": False,
  "use_sliding_window": False,
  "sliding_window": 4096,
  "layer_types": (),
  "decoder_sparse_step": 1,
  "moe_intermediate_size": 768,
  "num_experts_per_tok": 8,
  "num_experts": 128,
  "norm_topk_prob": False,
  "mlp_only_layers": (),
}

EXPERTS = {
  "moe/router": matrix("mlp.gate.weight"),
  "moe/gate": matrix("mlp.experts.{expert}.gate_proj.weight"),
  "moe/up": matrix("mlp.experts.{expert}.up_proj.weight"),
  "moe/down": matrix("mlp.experts.{expert}.down_proj.weight"),
}


def read(fields: Fields) -> dict[str, Any]:
  """Reads the shape of a Qwen3-MoE."""
  fields.only("attention_bias", False)
  shape = qwen3.read_common(fields)

  # Qwen3-Coder says what the class does anyway.
  fields.only("use_qk_norm", True)
  fields.only("qkv_bias", False)
  fields.only("shared_expert_intermediate_size", 0)

  # A window holds in all layers: there are no kinds of them.
  fields.irrelevant("max_window_layers")
  used, window, kinds = (
    fields.take("use_sliding_window"),
    fields.take("sliding_window", null=None, least=0),
    fields.take("layer_types"),
  )
  if used and window is not None:
    fields.refuse("use_sliding_window", used)
  if set(kinds) - {"full_attention"}:
    fields.refuse("layer_types", list(kinds))

  return (
    shape
    | read_rope(fields, yarn=True)
    | {
      "num_experts": fields.take("num_experts", aliases=("num_local_experts",)),  # as transformers 5 writes it
      "num_experts_per_token": fields.take("num_experts_per_tok"),
      "d_ff_expert": fields.take("moe_intermediate_size"),
      "renormalize_router": fields.take("norm_topk_prob"),
      "num_dense_layers": read_dense_layers(fields, shape["num_layers"]),
      "qk_norm": True,
    }
  )


def read_dense_layers(fields: Fields, num_layers: int) -> int:
  """Returns the number of layers without experts, which must be the first ones."""
  step, listed = fields.take("decoder_sparse_step"), fields.take("mlp_only_layers", items=int)
  dense = [layer for layer in range(num_layers) if layer in listed or (layer + 1) % step]
  if dense != list(range(len(dense))):
    name, value = ("mlp_only_layers", list(listed)) if step == 1 else ("decoder_sparse_step", step)
    fields.refuse(name, value)
  return len(dense)


def write(config: ModelConfig) -> dict[str, Any]:
  """Writes the config.json of a Qwen3-MoE."""
  return qwen3.write(config) | {
    "num_experts": config.num_experts,
    "num_experts_per_tok": config.num_experts_per_token,
    "moe_intermediate_size": config.d_ff_expert,
    "norm_topk_prob": config.renormalize_router,
    "mlp_only_layers": list(range(config.num_dense_layers)),
    "decoder_sparse_step": 1,
  }


FAMILY = Family(
  model_type="qwen3_moe",
  architecture="Qwen3MoeForCausalLM",
  defaults=DEFAULTS,
  read=read,
  write=write,
  tensors=qwen3.FAMILY.tensors | EXPERTS,
)
