"""GLM-5 and GLM-5.2 (arXiv 2602.15763): the experts of GLM-4.5, latent attention, sparse attention by an indexer.

The reference is transformers 5.24: both rotary embeddings turn interleaved pairs (earlier releases paired halves in the
indexer), and the norms of latents have an epsilon of their own. In GLM-5.2 some layers have no indexer and reuse the
choice of the last layer that has one; `indexer_types` names the kind of every layer.
"""

from __future__ import annotations

from typing import Any

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families import deepseek_v3, glm4_moe, qwen3
from sao_jax.huggingface.families.family import Family, matrix, stacked_layers, vector
from sao_jax.huggingface.families.fields import Fields
from sao_jax.huggingface.families.rotary_fields import read_rope
from sao_jax.models.attention.sparse import is_full

# config.json -> ModelConfig, with the same value.
SAME = {"index_topk": "index_topk", "index_n_heads": "index_num_heads", "index_head_dim": "index_head_dim"}
DEFAULTS = qwen3.COMMON | {
  "vocab_size": 154_880,
  "hidden_size": 6144,
  "intermediate_size": 12_288,
  "num_hidden_layers": 78,
  "num_attention_heads": 64,
  "num_key_value_heads": 64,
  "head_dim": 64,
  "max_position_embeddings": 202_752,
  "rms_norm_eps": 1e-5,
  "attention_bias": False,
  "mlp_bias": False,
  "kv_lora_rank": 512,
  "q_lora_rank": 2048,
  "qk_nope_head_dim": 192,
  "qk_rope_head_dim": 64,
  "v_head_dim": 256,
  "index_topk": 2048,
  "index_n_heads": 32,
  "index_head_dim": 128,
  "moe_intermediate_size": 2048,
  "num_experts_per_tok": 8,
  "n_routed_experts": 256,
  "n_shared_experts": 1,
  "routed_scaling_factor": 2.5,
  "n_group": 1,
  "topk_group": 1,
  "first_k_dense_replace": 3,
  "norm_topk_prob": True,
  "num_mtp_layers": 1,
  "layer_types": (),
  "mlp_layer_types": (),
  "indexer_types": (),
}
INDEXER = {
  "q": matrix("self_attn.indexer.wq_b.weight"),
  "k": matrix("self_attn.indexer.wk.weight"),
  "k_norm": vector("self_attn.indexer.k_norm.weight"),
  "k_norm_bias": vector("self_attn.indexer.k_norm.bias"),
  "weights": matrix("self_attn.indexer.weights_proj.weight"),
}


def read(fields: Fields) -> dict[str, Any]:
  """Reads the shape of a GLM-5."""
  # The only variants that are implemented.
  fields.only("mlp_bias", False)
  fields.only("indexer_rope_interleave", True)
  fields.only("moe_layer_freq", 1)
  fields.only("moe_router_dtype", "float32")

  # Settings of training and of multi-token prediction.
  glm4_moe.read_prediction_layers(fields)
  fields.irrelevant("ep_size", "index_share_for_mtp_iteration")

  # The fields with a counterpart in ModelConfig.
  shape = deepseek_v3.read_latent(fields)
  num_layers = shape["num_layers"]
  shape |= read_rope(fields)
  shape |= glm4_moe.read_experts(fields, num_layers, aliases=("num_experts", "num_local_experts"))
  shape |= {ours: fields.take(theirs) for theirs, ours in SAME.items()}

  # Lists with an entry per layer: of attention and feed-forward only the arrangements that the model has.
  kinds = fields.take("layer_types")
  if kinds and (set(kinds) - {"indexed_attention", "deepseek_sparse_attention"} or len(kinds) != num_layers):
    fields.refuse("layer_types", list(kinds))
  feed_forward = list(fields.take("mlp_layer_types"))
  if feed_forward:
    shape["num_dense_layers"] = dense = feed_forward.count("dense")
    if feed_forward != ["dense"] * dense + ["sparse"] * (num_layers - dense):
      fields.refuse("mlp_layer_types", feed_forward)
  types = read_indexer_types(fields, num_layers)
  return shape | {"indexer_types": types}


def read_indexer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
  """Returns "full" or "shared" for every layer; () if each has an indexer.

  A folder lists the kinds (indexer_types), spells them as letters, or gives a rhythm; the first of these counts.
  """
  pattern = read_pattern(fields)
  rhythm, offset = max(fields.take("index_topk_freq", 1, least=0), 1), fields.take("index_skip_topk_offset", 2, least=0)
  regular = ("shared" if max(i - offset + 1, 0) % rhythm else "full" for i in range(num_layers))
  types = fields.take("indexer_types") or pattern or tuple(regular)
  if len(types) != num_layers or set(types) - {"full", "shared"} or types[0] != "full":
    fields.refuse("indexer_types", list(types))
  return types if "shared" in types else ()


def read_pattern(fields: Fields) -> tuple[str, ...]:
  """Reads index_topk_pattern: kinds of layers as a list, or as letters, "FSSF"."""
  spelling = {"F": "full", "S": "shared"}
  if fields.holds("index_topk_pattern", str):
    return tuple(spelling.get(letter, letter) for letter in fields.take("index_topk_pattern", ""))
  return fields.take("index_topk_pattern", ())


def write(config: ModelConfig) -> dict[str, Any]:
  """Writes the config.json of a GLM-5, without layers for multi-token prediction."""
  indexers = {theirs: getattr(config, ours) for theirs, ours in SAME.items()}
  types = ["full" if full else "shared" for full in is_full(config)]
  return deepseek_v3.write(config) | indexers | {"indexer_types": types}


def layers(config: ModelConfig, name: str) -> tuple[int, ...]:
  """Returns the layers of the model that a parameter stacks; parameters of the indexer stack those that have one."""
  if name.startswith("indexer_layers/"):
    return tuple(i for i, full in enumerate(is_full(config)) if full)
  return stacked_layers(config, name)


FAMILY = Family(
  model_type="glm_moe_dsa",
  architecture="GlmMoeDsaForCausalLM",
  defaults=DEFAULTS,
  read=read,
  write=write,
  tensors=deepseek_v3.FAMILY.tensors | INDEXER,
  float32=frozenset({"moe/correction_bias", "moe/router"}),
  beyond_trunk=glm4_moe.prediction_layers,
  layers=layers,
)
