"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with routed experts, a softmax over all of them, and no shared one."""

from __future__ import annotations

from typing import Any

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families import qwen3
from sao_jax.huggingface.families.family import Family, matrix
from sao_jax.huggingface.families.fields import Fields, read_rope

EXPERTS = {
  "moe/router": matrix("mlp.gate.weight"),
  "moe/gate": matrix("mlp.experts.{expert}.gate_proj.weight"),
  "moe/up": matrix("mlp.experts.{expert}.up_proj.weight"),
  "moe/down": matrix("mlp.experts.{expert}.down_proj.weight"),
}


def read(fields: Fields) -> dict[str, Any]:
  """Reads the shape of a Qwen3-MoE."""
  fields.only("attention_bias", False)
  fields.only("decoder_sparse_step", 1)
  qwen3.read_full_attention(fields)

  # transformers 5 writes num_local_experts for what was num_experts.
  num_experts = fields.take("num_experts" if "num_experts" in fields else "num_local_experts")
  if num_experts < 1:
    fields.refuse("num_experts", num_experts)

  # Dense layers, if any, must be the first ones.
  dense = list(fields.take("mlp_only_layers", ()))
  if dense != list(range(len(dense))):
    fields.refuse("mlp_only_layers", dense)

  return (
    qwen3.read_common(fields)
    | read_rope(fields, yarn=True)
    | {
      "num_experts": num_experts,
      "num_experts_per_token": fields.take("num_experts_per_tok"),
      "d_ff_expert": fields.take("moe_intermediate_size"),
      "renormalize_router": fields.take("norm_topk_prob", False),
      "num_dense_layers": len(dense),
      "qk_norm": True,
    }
  )


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
  read=read,
  write=write,
  tensors=qwen3.FAMILY.tensors | EXPERTS,
)
