"""The cache of latent attention in pages: the latents of every token, which are never expanded."""

from __future__ import annotations

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from sao_jax.config import ModelConfig
from sao_jax.models.attention.latent import LatentAttend, absorb, absorbed_values
from sao_jax.parallel.layout import Layout
from sao_jax.sampler.page_batch import PageBatch, write_tokens
from sao_jax.sampler.paged_attention import attend_pages


@flax.struct.dataclass
class LatentPages:
  """Pages of c positions, those of all layers in one array, as in `KVPages`.

  Attributes:
    latent: [D * L * n, c, m], m = compressed numbers and rotary key, one vector per token for all heads.
  """

  LOGICAL_AXES: ClassVar = ("slots",)  # a latent is for all heads: each device of "tensor" has it

  latent: Float[Array, "DLn c m"]

  @classmethod
  def empty(
    cls, config: ModelConfig, num_pages: int, page_size: int, dtype: jax.typing.DTypeLike, layout: Layout
  ) -> LatentPages:
    """Zeros for `num_pages` pages of every pool."""
    total = layout.shards("slots") * config.num_layers * num_pages
    return cls(jnp.zeros((total, page_size, config.kv_lora_rank + config.qk_rope_head_dim), dtype))

  @property
  def page_size(self) -> int:
    """Positions of a page."""
    return self.latent.shape[1]

  def attend(self, config: ModelConfig, batch: PageBatch, layout: Layout) -> LatentAttend:
    """Returns the `attend` of a call whose carry is this cache: absorbed attention over the latents in their pages."""
    rank, plain, page_size = config.kv_lora_rank, config.qk_nope_head_dim, self.page_size
    num_pages = self.latent.shape[0] // (layout.shards("slots") * config.num_layers)

    def of_pool(
      q: jax.Array, latent: jax.Array, kv_b: jax.Array, layer: jax.Array, pages: jax.Array, batch: PageBatch
    ) -> tuple[jax.Array, jax.Array]:
      first, flat = layer * num_pages, lambda x: x.reshape(-1, *x.shape[2:])
      pages = write_tokens(pages, flat(latent), batch, first, num_pages)

      # Every head reads the latents themselves: as keys in full, as values their compressed numbers.
      def read(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        latents = pages[numbers].reshape(numbers.shape[0], -1, 1, pages.shape[-1]).astype(q.dtype)
        return latents, latents[..., :rank]

      queries, scale = flat(absorb(q, kv_b, plain)), q.shape[-1] ** -0.5
      weighted = attend_pages(queries, read, page_size, **batch.sequences(first, num_pages), sm_scale=scale)
      return absorbed_values(weighted.reshape(*q.shape[:3], rank), kv_b, plain), pages

    def attend(
      q: jax.Array, latent: jax.Array, kv_b: jax.Array, selection: None, layer_index: jax.Array, cache: LatentPages
    ) -> tuple[jax.Array, LatentPages]:
      del selection
      arguments = (q, latent, kv_b, layer_index, cache.latent, batch)
      if layout.mesh is None:
        out, pages = of_pool(*arguments)
        return out, LatentPages(pages)

      heads, tokens = layout.spec("slots", None, "heads"), layout.spec("slots")
      in_specs = (heads, tokens, layout.spec(None, "heads"), PartitionSpec(), tokens, tokens)
      out, pages = jax.shard_map(
        of_pool, mesh=layout.mesh, in_specs=in_specs, out_specs=(heads, tokens), check_vma=False
      )(*arguments)
      return out, LatentPages(pages)

    def select(*unused: object) -> None:
      raise NotImplementedError("sparse attention has no cache in pages")

    return LatentAttend(batch.page_indices.shape[1] * page_size, select, attend)
