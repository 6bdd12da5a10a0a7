"""The cache of latent attention in pages: the latents of every token, never expanded, and the keys of indexers."""

from __future__ import annotations

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.attention.latent import (
  LatentAttend,
  Selection,
  absorb,
  absorbed_values,
  is_choosing,
  score_scale,
)
from sao_jax.models.attention.selected import read_selected
from sao_jax.models.attention.sparse import Index, choose_positions, is_full
from sao_jax.parallel.layout import Layout
from sao_jax.sampler.page_batch import PageBatch, flat, on_pools, page_width, widen, write_tokens
from sao_jax.sampler.paged_attention import attend_pages, by_sequence


@flax.struct.dataclass
class LatentPages:
  """Pages of c positions, those of all layers in one array, as in `KVPages`.

  Attributes:
    latent: [D * L * n, c, m], m = compressed numbers and rotary key, one vector per token for all heads.
    index: [D * F * n, c, i], F indexers; None without sparse attention.
  """

  LOGICAL_AXES: ClassVar = ("slots",)  # a latent is for all heads: each device of "tensor" has it

  latent: Float[Array, "DLn c m"]
  index: Float[Array, "DFn c i"] | None

  @classmethod
  def empty(
    cls, config: ModelConfig, num_pages: int, page_size: int, dtype: jax.typing.DTypeLike, layout: Layout
  ) -> LatentPages:
    """Zeros for `num_pages` pages of every pool."""
    total = layout.shards("slots") * num_pages
    zeros = lambda layers, width: jnp.zeros((total * layers, page_size, page_width(width, layout)), dtype)
    latent = zeros(config.num_layers, config.kv_lora_rank + config.qk_rope_head_dim)
    return cls(latent, zeros(sum(is_full(config)), config.index_head_dim) if config.index_topk else None)

  @property
  def page_size(self) -> int:
    """Positions of a page."""
    return self.latent.shape[1]

  def attend(self, config: ModelConfig, batch: PageBatch, layout: Layout) -> LatentAttend:
    """Returns the `attend` of a call whose carry is this cache: absorbed attention over the latents in their pages.

    What is passed between layers are places in the pool, page · c + offset, and not positions: they hold for every
    layer. Where places are chosen, no other latents are read.
    """
    num_pages = self.latent.shape[0] // (layout.shards("slots") * config.num_layers)
    num_positions = batch.page_indices.shape[1] * self.page_size
    heads, tokens = layout.spec("slots", None, "heads"), layout.spec("slots")

    def select(index: Index, number: jax.Array, cache: LatentPages) -> tuple[Selection, LatentPages]:
      def of_pool(index: Index, number: jax.Array, pages: jax.Array, batch: PageBatch) -> tuple[Selection, jax.Array]:
        # Keys are kept also as long as everything is read: later tokens may have to choose.
        first = number * num_pages
        pages = write_tokens(pages, flat(index.keys), batch, first, num_pages)
        if not is_choosing(config, num_positions):
          return None, pages
        return _choose(config, index, pages, first, batch, num_pages), pages

      specs = (tokens, PartitionSpec(), tokens, tokens)
      chosen, pages = on_pools(of_pool, layout, specs, (tokens, tokens))(index, number, cache.index, batch)
      return chosen, cache.replace(index=pages)

    def attend(
      q: jax.Array, latent: jax.Array, kv_b: jax.Array, selection: Selection, layer: jax.Array, cache: LatentPages
    ) -> tuple[jax.Array, LatentPages]:
      def of_pool(
        q: jax.Array, latent: jax.Array, kv_b: jax.Array, selection: Selection, layer: jax.Array, pages: jax.Array,
        batch: PageBatch,
      ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        # Written first, so that a token reads itself and those before it in this call.
        first = layer * num_pages
        pages = write_tokens(pages, flat(latent), batch, first, num_pages)
        queries = widen(absorb(q, kv_b, config.qk_nope_head_dim), pages.shape[-1])
        weighted = _read(config, queries, selection, pages, first, batch, num_pages)
        return absorbed_values(weighted, kv_b, config.qk_nope_head_dim), pages

      # Heads over "tensor"; the latents, which all of them read, on each of its devices.
      specs = (heads, tokens, layout.spec(None, "heads"), tokens, PartitionSpec(), tokens, tokens)
      run = on_pools(of_pool, layout, specs, (heads, tokens))
      out, pages = run(q, latent, kv_b, selection, layer, cache.latent, batch)
      return out, cache.replace(latent=pages)

    return LatentAttend(num_positions, select, attend)


def _choose(
  config: ModelConfig,
  index: Index,
  pages: Float[Array, "P c i"],
  first_page: Int[Array, ""],
  batch: PageBatch,
  num_pages: int,
) -> Int[Array, "B T k"]:
  """The places that every token of a pool reads, then -1."""
  page_size = pages.shape[1]

  def of_group(queries: jax.Array, weights: jax.Array, numbers: jax.Array, limits: jax.Array) -> jax.Array:
    # A query of no sequence chooses the first position, and is not used.
    keys = pages[numbers].reshape(numbers.shape[0], -1, pages.shape[-1]).astype(queries.dtype)
    position = jnp.arange(keys.shape[1], dtype=jnp.int32)
    readable = lambda limits: position < limits[..., None]
    chosen = choose_positions(queries, weights, [keys], readable, config.index_topk, jnp.maximum(limits, 1))

    # From positions to places, which count from the first page of a layer.
    of_page = jax.vmap(lambda numbers, chosen: numbers[chosen // page_size])(numbers - first_page, chosen)
    return jnp.where(chosen < 0, -1, of_page * page_size + chosen % page_size)

  sequences = batch.sequences(first_page, num_pages)
  queries = widen(flat(index.queries), pages.shape[-1])
  places = by_sequence(of_group, queries, flat(index.weights), **sequences)
  return places.reshape(*index.weights.shape[:2], -1)


def _read(
  config: ModelConfig,
  queries: Float[Array, "B T H m"],
  selection: Selection,
  pages: Float[Array, "P c m"],
  first_page: Int[Array, ""],
  batch: PageBatch,
  num_pages: int,
) -> Float[Array, "B T H R"]:
  """The weighted sums of compressed vectors. Heads read the same latents: as keys in full, as values the first R."""
  rank, page_size, scale = config.kv_lora_rank, pages.shape[1], score_scale(config)
  if selection is not None:
    rows, first = pages.reshape(-1, pages.shape[-1]), first_page * page_size
    gather = lambda places: rows[first + places].astype(queries.dtype)
    return read_selected(queries, gather, selection, rank, scale)

  def read(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    latents = pages[numbers].reshape(numbers.shape[0], -1, 1, pages.shape[-1]).astype(queries.dtype)
    return latents, latents[..., :rank]

  sequences = batch.sequences(first_page, num_pages)
  weighted = attend_pages(flat(queries), read, page_size, **sequences, sm_scale=scale)
  return weighted.reshape(*queries.shape[:-1], rank)
