"""A tiny model with latent, sparse attention, random parameters that matter, and one layer of it as a function."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.config import ModelConfig, YarnConfig
from sao_jax.models.attention.latent import latent_layer, latent_specs, no_selection, packed_latent_attend
from sao_jax.models.attention.sparse import indexer_specs
from sao_jax.models.rope import rope_table
from sao_jax.parallel.params import stack_specs
from toys.masked_attention import packed_causal_mask

# Every width differs, so that no transposition goes unnoticed. Rows of 13 tokens, of which a query reads 5.
CONFIG = ModelConfig(
  vocab_size=64,
  num_layers=2,
  d_model=32,
  num_heads=4,
  num_kv_heads=4,
  d_ff=40,
  kv_lora_rank=12,
  q_lora_rank=16,
  qk_nope_head_dim=10,
  qk_rope_head_dim=4,
  v_head_dim=6,
  index_topk=5,
  index_num_heads=8,
  index_head_dim=9,
)
DENSE = dataclasses.replace(CONFIG, index_topk=0)
# A context stretched as that of DeepSeek-V3: scores are multiplied by 1.46, cos and sin by 1.1.
YARN = YarnConfig(factor=8.0, original_positions=16, mscale_all_dim=1.0, attention_factor=1.1)
LENGTH = 13


def random_params(specs, seed=0):
  """Every leaf random and large enough to matter, norms included."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda s: jnp.asarray(rng.normal(0.1, 0.4, s.shape), jnp.float32), specs)


def layer_params(config=CONFIG, seed=0):
  """The parameters of one layer and the stack of its one indexer."""
  return random_params(latent_specs(config), seed), random_params(stack_specs(indexer_specs(config), 1), seed + 1)


def hidden_states(rows=1, length=LENGTH, config=CONFIG, seed=5):
  return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, length, config.d_model)), jnp.float32)


def run_layer(params, indexers, x, positions, segments, config=CONFIG):
  """The first layer's attention over packed rows. Returns its output and what its tokens read, as a mask [B, T, T]."""
  config = dataclasses.replace(config, indexer_types=("full", "shared"))  # the first layer passes its selection on
  attend = packed_latent_attend(config, segments)
  table = rope_table(positions, config.qk_rope_head_dim, config.rope_theta)
  selection = no_selection(config, attend, *x.shape[:2])
  out, _, selection = latent_layer(
    params, x, table, config, attend, jnp.int32(0), None, common={"indexer_layers": indexers}, passed=selection
  )
  return out, as_mask(selection, segments)


def as_mask(selection, segments):
  """mask[b, t, s]: does token t read token s? All earlier ones of its segment where nothing is selected."""
  if selection is None:
    return packed_causal_mask(segments)
  return jnp.any(selection[..., None] == jnp.arange(segments.shape[1]), axis=2)
