"""Tiny transformers, their random parameters, and two packed rows to run them on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.config import ModelConfig
from sao_jax.models.attention.grouped import packed_attend
from sao_jax.models.transformer import head_logits, param_specs, trunk

SMALL = ModelConfig(vocab_size=11, num_layers=2, d_model=8, num_heads=4, num_kv_heads=2, head_dim=4, d_ff=12)


MOE = dataclasses.replace(SMALL, num_experts=4, num_experts_per_token=2, d_ff_expert=6)


IDS = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]], np.int32)


SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)


POSITIONS = np.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]], np.int32)


def random_params(config, seed=0):
  """Every leaf random and large enough to matter, norms included."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda s: jnp.asarray(rng.normal(0.1, 0.5, s.shape), jnp.float32), param_specs(config))


def logits_of(params, config, ids, positions, segments):
  hidden, _, _ = trunk(
    params, config, jnp.asarray(ids), jnp.asarray(positions), attend=packed_attend(jnp.asarray(segments))
  )
  return head_logits(params, config, hidden)
