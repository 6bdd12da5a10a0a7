"""The cache of each kind of attention, in slots and in pages, and an empty one for a model."""

from __future__ import annotations

import jax

from sao_jax.config import ModelConfig
from sao_jax.models.attention import AttentionKind, attention_kind
from sao_jax.models.attention.grouped import GROUPED
from sao_jax.models.attention.latent import LATENT
from sao_jax.parallel.layout import Layout
from sao_jax.sampler.cache import Cache
from sao_jax.sampler.kv_cache import KVCache
from sao_jax.sampler.kv_pages import KVPages
from sao_jax.sampler.latent_cache import LatentCache
from sao_jax.sampler.latent_pages import LatentPages

PagedCache = KVPages | LatentPages

CACHES: dict[AttentionKind, type[Cache]] = {GROUPED: KVCache, LATENT: LatentCache}
PAGES: dict[AttentionKind, type[PagedCache]] = {GROUPED: KVPages, LATENT: LatentPages}


def empty_cache(config: ModelConfig, rows: int, length: int, dtype: jax.typing.DTypeLike) -> Cache:
  """Zeros for `rows` slots of `length` positions."""
  return CACHES[attention_kind(config)].empty(config, rows, length, dtype)


def empty_pages(
  config: ModelConfig, num_pages: int, page_size: int, dtype: jax.typing.DTypeLike, layout: Layout
) -> PagedCache:
  """Zeros for `num_pages` pages of every pool."""
  return PAGES[attention_kind(config)].empty(config, num_pages, page_size, dtype, layout)
