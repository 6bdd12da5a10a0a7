"""The cache of grouped-query attention in pages: keys and values of every token, in a pool that the slots share."""

from __future__ import annotations

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from sao_jax.config import ModelConfig
from sao_jax.models.attention.grouped import GroupedAttend
from sao_jax.parallel.layout import Layout
from sao_jax.sampler.page_batch import PageBatch, flat, on_pools, page_width, widen, write_tokens
from sao_jax.sampler.paged_attention import paged_attention


@flax.struct.dataclass
class KVPages:
  """Pages of c positions, those of all L layers in one array: page i of layer l is its entry l · n + i, n pages a pool.

  So that a layer's pages are never cut out: the kernel reads them where they are, by number.

  Attributes:
    kv: [D * L * n, c, 2K, h], rotary embedding applied; key and value of a head side by side. The pools of the D parts
      of a mesh lie one behind the other.
  """

  LOGICAL_AXES: ClassVar = ("slots", None, "kv_heads")

  kv: Float[Array, "DLn c n h"]

  @classmethod
  def empty(
    cls, config: ModelConfig, num_pages: int, page_size: int, dtype: jax.typing.DTypeLike, layout: Layout
  ) -> KVPages:
    """Zeros for `num_pages` pages of every pool."""
    total = layout.shards("slots") * config.num_layers * num_pages
    width = page_width(config.head_dim, layout)
    return cls(jnp.zeros((total, page_size, 2 * config.num_kv_heads, width), dtype))

  @property
  def page_size(self) -> int:
    """Positions of a page."""
    return self.kv.shape[1]

  def attend(self, config: ModelConfig, batch: PageBatch, layout: Layout) -> GroupedAttend:
    """Returns the `attend` of a call whose carry is this cache: it writes the call's tokens, then reads.

    Every part of a mesh has the tokens of its own slots, and their pages: nothing moves between devices.
    """
    num_pages = self.kv.shape[0] // (layout.shards("slots") * config.num_layers)
    attention, scale = paged_attention(layout.platform), config.head_dim**-0.5

    def of_pool(
      q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, kv: jax.Array, batch: PageBatch
    ) -> tuple[jax.Array, jax.Array]:
      # Key and value of a head side by side, as the kernel reads them.
      first = layer * num_pages
      new = jnp.stack([flat(k), flat(v)], axis=2)  # [N, K, 2, h]
      kv = write_tokens(kv, new.reshape(new.shape[0], -1, new.shape[-1]), batch, first, num_pages)

      # Written first, so that a token reads itself and those before it in this call.
      out = attention(widen(flat(q), kv.shape[-1]), kv, **batch.sequences(first, num_pages), sm_scale=scale)
      return out[..., : q.shape[-1]].reshape(q.shape), kv

    # Heads of keys and values over "tensor", with the heads of queries that read them.
    heads, of_kv = layout.spec("slots", None, "heads"), layout.spec("slots", None, "kv_heads")
    in_specs = (heads, of_kv, of_kv, PartitionSpec(), of_kv, layout.spec("slots"))
    run = on_pools(of_pool, layout, in_specs, (heads, of_kv))

    def attend(
      q: jax.Array, k: jax.Array, v: jax.Array, layer_index: jax.Array, cache: KVPages
    ) -> tuple[jax.Array, KVPages]:
      out, kv = run(q, k, v, layer_index, cache.kv, batch)
      return out, KVPages(kv)

    return attend
