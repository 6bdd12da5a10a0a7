"""Random files config.json of every family, and what transformers makes of one, in our names."""

from __future__ import annotations

import dataclasses
from typing import Any

# Small values of each field of the config classes; null where one of the classes allows it.
VALUES: dict[str, tuple[Any, ...]] = {
  "vocab_size": (64, 97),
  "hidden_size": (32, 64),
  "intermediate_size": (48,),
  "num_hidden_layers": (1, 2, 5),
  "num_attention_heads": (2, 4),
  "num_key_value_heads": (1, 2, 4, None),
  "head_dim": (8, 16, None),
  "max_position_embeddings": (256, 4096),
  "initializer_range": (0.02, 0.1),
  "rms_norm_eps": (1e-6, 1e-5),
  "tie_word_embeddings": (True, False),
  "hidden_act": ("silu",),
  "attention_dropout": (0.0, 0),
  "attention_bias": (False, False, True),
  "attention_out_bias": (False, True),
  "mlp_bias": (False,),
  "residual_dropout": (0.0,),
  "pretraining_tp": (1,),
  "use_sliding_window": (True, False),
  "sliding_window": (None, 16),
  "max_window_layers": (0, 3, 5, 28),
  "layer_types": (None,),
  "mlp_layer_types": (None,),
  "indexer_types": (None,),
  "decoder_sparse_step": (1, 1, 2, 9),
  "mlp_only_layers": (None, [], [0], [1, 0], [9], [1]),
  "moe_intermediate_size": (8, 24),
  "num_experts_per_tok": (1, 2),
  "num_experts": (4, 8),
  "n_routed_experts": (4, 8),
  "n_shared_experts": (0, 1, 2),
  "norm_topk_prob": (True, False),
  "routed_scaling_factor": (1.0, 2.5),
  "n_group": (1, 2),
  "topk_group": (1,),
  "first_k_dense_replace": (0, 1, 3),
  "use_qk_norm": (True, False),
  "num_mtp_layers": (0, 1),
  "kv_lora_rank": (12,),
  "q_lora_rank": (20,),
  "qk_nope_head_dim": (10,),
  "qk_rope_head_dim": (4, 8),
  "v_head_dim": (6,),
  "rope_interleave": (True,),
  "index_topk": (16,),
  "index_head_dim": (9, 16),
  "index_n_heads": (4,),
  "pad_token_id": (None, 3),
  "bos_token_id": (None, 1),
  "eos_token_id": (None, 2, [2, 5]),
  "use_cache": (True, False),
  "output_router_logits": (True, False),
  "router_aux_loss_coef": (0.1,),
}
ELSEWHERE = ("rope_parameters", "transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype")
ELSEWHERE += ("chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type")

# Ours and theirs, with the same value.
NAMES = {
  "vocab_size": "vocab_size",
  "d_model": "hidden_size",
  "d_ff": "intermediate_size",
  "num_layers": "num_hidden_layers",
  "num_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
  "max_positions": "max_position_embeddings",
  "rms_norm_eps": "rms_norm_eps",
  "initializer_range": "initializer_range",
  "tie_embeddings": "tie_word_embeddings",
  "num_experts_per_token": "num_experts_per_tok",
  "d_ff_expert": "moe_intermediate_size",
  "renormalize_router": "norm_topk_prob",
  "num_expert_groups": "n_group",
  "num_groups_per_token": "topk_group",
  "routed_scaling": "routed_scaling_factor",
  "attention_bias": "attention_bias",
  "kv_lora_rank": "kv_lora_rank",
  "q_lora_rank": "q_lora_rank",
  "qk_nope_head_dim": "qk_nope_head_dim",
  "qk_rope_head_dim": "qk_rope_head_dim",
  "v_head_dim": "v_head_dim",
  "index_topk": "index_topk",
  "index_num_heads": "index_n_heads",
  "index_head_dim": "index_head_dim",
}


def shape_by_transformers(config: Any) -> dict[str, Any]:
  """Fields of ModelConfig by a transformers configuration: those that it has, and those that follow from them."""
  shape = {ours: getattr(config, theirs) for ours, theirs in NAMES.items() if hasattr(config, theirs)}
  heads, layers = config.num_attention_heads, config.num_hidden_layers
  shape["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // heads
  experts = getattr(config, "num_local_experts", None)
  if not experts:
    return shape | {"num_experts": 0}

  # Layers without experts, by any of three fields.
  if getattr(config, "mlp_layer_types", None) is not None:
    dense = [i for i, kind in enumerate(config.mlp_layer_types) if kind == "dense"]
  elif hasattr(config, "first_k_dense_replace"):
    dense = [i for i in range(layers) if i < config.first_k_dense_replace]
  else:
    dense = [i for i in range(layers) if i in config.mlp_only_layers or (i + 1) % config.decoder_sparse_step]
  assert dense == list(range(len(dense)))
  shape |= {"num_experts": experts, "num_dense_layers": len(dense)}

  if hasattr(config, "n_shared_experts"):
    shape["d_ff_shared"] = config.n_shared_experts * config.moe_intermediate_size
  if hasattr(config, "indexer_types"):
    shape["indexer_types"] = tuple(config.indexer_types) if "shared" in config.indexer_types else ()
  return shape


def has_windows(config: Any) -> bool:
  """True if a layer reads only a window of its context."""
  kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
  if kinds is not None:
    return "sliding_attention" in kinds
  return window is not None and window < config.max_position_embeddings


def sound(config: Any) -> bool:
  """True if a model of this configuration can run, which the config classes do not check."""
  heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
  head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
  indexers = getattr(config, "indexer_types", None)
  if indexers is not None and (len(indexers) != config.num_hidden_layers or indexers[0] != "full"):
    return False
  if hasattr(config, "kv_lora_rank"):
    return heads == kv_heads
  return heads % kv_heads == 0 and head_dim >= 4 and head_dim % 4 == 0


def random_file(rng: Any, config_class: Any) -> dict[str, Any]:
  """A file with some fields of the class, under the names of one version or another; it need not be legal."""
  pick = lambda values: values[rng.integers(len(values))]
  chance = lambda share: rng.random() < share
  fields = {}
  for field in dataclasses.fields(config_class):
    if field.name not in ELSEWHERE and chance(0.7):
      fields[field.name] = pick(VALUES[field.name])
  small = {"num_hidden_layers": 5, "hidden_size": 64, "num_attention_heads": 4}
  fields = small | fields if chance(0.8) else fields

  # Fields under their other names, and fields that are no part of the class.
  own = {field.name for field in dataclasses.fields(config_class)}
  for pair in config_class.attribute_map.items():
    values = VALUES[next(name for name in pair if name in own)]
    for new, old in (pair, pair[::-1]):
      if old in fields and new not in fields and chance(0.5):
        fields[new] = pick(values) if chance(0.5) else fields.pop(old)
  if "head_dim" not in config_class.__annotations__ and chance(0.5):
    fields["head_dim"] = pick((8, 16))
  layers = fields.get("num_hidden_layers")
  if layers and "layer_types" in fields:
    fields["layer_types"] = [pick(("full_attention", "sliding_attention"))] * layers if chance(0.7) else None
    if hasattr(config_class, "indexer_types"):
      fields["layer_types"] = pick((None, ["indexed_attention"] * layers, ["deepseek_sparse_attention"] * layers))
  if layers and "mlp_layer_types" in fields:
    dense = int(rng.integers(layers + 1))
    fields["mlp_layer_types"] = pick((None, ["dense"] * dense + ["sparse"] * (layers - dense)))
  if "indexer_types" in fields:
    fields |= random_indexers(rng, layers or 0)
    fields |= {"num_experts": pick((4, 8))} if chance(0.3) else {}
  return fields | random_rope(rng)


def random_indexers(rng: Any, layers: int) -> dict[str, Any]:
  """The kinds of GLM-5's layers in one of their forms."""
  letters = "F" + "".join(rng.choice(["F", "S"], max(layers - 1, 0)))
  kinds = [{"F": "full", "S": "shared"}[letter] for letter in letters]
  forms = (
    {"indexer_types": kinds},
    {"indexer_types": None, "index_topk_pattern": letters},
    {"indexer_types": None, "index_topk_pattern": kinds, "index_topk_freq": 3},
    {"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": int(rng.integers(4))},
    {"indexer_types": None, "index_topk_freq": 0},
    {"indexer_types": None, "index_topk_pattern": None},
  )
  return forms[rng.integers(len(forms))]


def random_rope(rng: Any) -> dict[str, Any]:
  """Rotary embeddings in the old form, the new one, both, or none."""
  pick = lambda values: values[rng.integers(len(values))]
  chance = lambda share: rng.random() < share
  fields: dict[str, Any] = {}
  if chance(0.6):
    fields["rope_theta"] = pick((1e4, 1e6, 500_000))
  if chance(0.2):
    fields["partial_rotary_factor"] = pick((0.5, 1.0, None))
  if chance(0.1):
    fields["original_max_position_embeddings"] = 512

  def settings() -> dict[str, Any]:
    rope: dict[str, Any] = {pick(("rope_type", "type")): pick(("default", "yarn", "yarn", "llama3"))}
    rope |= {"rope_type": rope["type"]} if "type" in rope and chance(0.3) else {}
    rope |= {"rope_theta": pick((1e4, 1e6))} if chance(0.5) else {}
    rope |= {"partial_rotary_factor": pick((0.5, 1.0))} if chance(0.1) else {}
    if "llama3" in rope.values():
      rope |= {"factor": pick((1.0, 8.0)), "low_freq_factor": pick((1.0, 2)), "high_freq_factor": pick((4.0, 3, 1.5))}
      rope |= {"original_max_position_embeddings": pick((64, 1024))} if chance(0.6) else {}
      rope |= {"mscale_all_dim": 0.7} if chance(0.1) else {}
    if "yarn" in rope.values():
      rope["factor"] = pick((1.0, 2, 4.0, None))
      rope |= {"original_max_position_embeddings": pick((64, 1024))} if chance(0.6) else {}
      rope |= {"attention_factor": pick((None, 1.0, 1.3))} if chance(0.4) else {}
      rope |= {"mscale": pick((0.7, 1.0)), "mscale_all_dim": pick((1.0, 0.8))} if chance(0.3) else {}
      rope |= {pick(("mscale", "mscale_all_dim")): 0.7} if chance(0.2) else {}
      rope |= {"beta_fast": pick((16, 24.0, None)), "beta_slow": pick((1, 2.0, 20.0, None))} if chance(0.4) else {}
      rope |= {"truncate": pick((True, False))} if chance(0.3) else {}
    return rope

  for name in ("rope_scaling", "rope_parameters"):
    if chance(0.5):
      fields[name] = pick((settings(), settings(), {}, None))
  return fields


def smallest(config_class: Any) -> dict[str, Any]:
  """A small file that everybody accepts."""
  fields = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
  windows = any(field.name == "sliding_window" for field in dataclasses.fields(config_class))
  return fields | {"max_position_embeddings": 256} | ({"sliding_window": None} if windows else {})


def follows_from(name: str, problem: str) -> bool:
  """True if the refusal of another field is that of this one: it follows from it."""
  lists = ("layer_types", "mlp_layer_types", "indexer_types")
  return {
    "num_attention_heads": "num_key_value_heads = 4" in problem,
    "num_hidden_layers": any(field in problem for field in lists),
    "index_topk_pattern": "indexer_types" in problem,
    "index_topk_freq": "indexer_types" in problem,
    "index_skip_topk_offset": "indexer_types" in problem,
    "type": "rope_type" in problem,
  }.get(name, "rope_type = 'yarn'" in problem)


def more_lenient(name: str, change: dict[str, Any]) -> bool:
  """True if we may accept what transformers refuses: a whole number for a float, and emptiness."""
  value = next(iter(change.values()))
  null = value is None and name in ("num_key_value_heads", "head_dim", "num_mtp_layers")
  return (type(value) is int and value > 0) or value == [] or null
