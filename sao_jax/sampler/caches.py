"""The cache of each kind of attention, and an empty one for a model."""

from __future__ import annotations

import jax

from sao_jax.config import ModelConfig
from sao_jax.models.attention import AttentionKind, attention_kind
from sao_jax.models.attention.grouped import GROUPED
from sao_jax.models.attention.latent import LATENT
from sao_jax.sampler.cache import Cache
from sao_jax.sampler.kv_cache import KVCache
from sao_jax.sampler.latent_cache import LatentCache

CACHES: dict[AttentionKind, type[Cache]] = {GROUPED: KVCache, LATENT: LatentCache}


def empty_cache(config: ModelConfig, rows: int, length: int, dtype: jax.typing.DTypeLike) -> Cache:
  """Zeros for `rows` slots of `length` positions."""
  return CACHES[attention_kind(config)].empty(config, rows, length, dtype)
