"""How the fields of latent and of sparse attention relate: what is wrong with them, or None."""

from __future__ import annotations

from sao_jax.config import ModelConfig

_WIDTHS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def latent_problem(model: ModelConfig) -> str | None:
  """Latent attention has all of its widths, and nothing that only grouped-query attention has."""
  if not model.kv_lora_rank:
    unused = [name for name in (*_WIDTHS, "index_topk") if getattr(model, name)]
    return f"it is 0: there is no latent attention, to which {', '.join(unused)} belong." if unused else None
  missing = [name for name in _WIDTHS if not getattr(model, name)]
  if missing:
    return f"latent attention needs {', '.join(missing)} as well."
  if model.qk_rope_head_dim % 2:
    return f"qk_rope_head_dim is {model.qk_rope_head_dim}, an odd number; rotary embeddings turn pairs."
  if model.num_kv_heads != model.num_heads:
    return f"latent attention has as many key-value heads as heads, not {model.num_kv_heads} of {model.num_heads}."
  if model.attention_bias or model.rotary_fraction != 1.0 or model.yarn.factor != 1.0:
    return "attention_bias, rotary_fraction and yarn are not implemented for latent attention."
  return None


def indexer_problem(model: ModelConfig) -> str | None:
  """An indexer has heads, wide enough for the rotary part."""
  if model.index_topk and (not model.index_num_heads or model.index_head_dim < model.qk_rope_head_dim):
    widths = f"{model.index_num_heads} heads of {model.index_head_dim} dimensions"
    return f"an indexer of {widths} cannot hold the {model.qk_rope_head_dim} that are rotated."
  return None


def indexer_types_problem(model: ModelConfig) -> str | None:
  """Every layer has a kind, and the first one an indexer."""
  kinds = model.indexer_types
  if not kinds:
    return None
  if not model.index_topk:
    return "index_topk=0 leaves indexers out."
  if len(kinds) != model.num_layers or set(kinds) - {"full", "shared"}:
    return f"it names {len(kinds)} kinds of {model.num_layers} layers: {', '.join(sorted(set(kinds)))}."
  return "the first layer is shared, and there is none before it." if kinds[0] == "shared" else None
