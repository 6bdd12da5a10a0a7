"""The cache of latent attention: the latents of every token, which are never expanded, and the keys of indexers."""

from __future__ import annotations

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.attention.latent import LatentAttend, Selection, absorb, absorbed_values
from sao_jax.models.attention.sparse import Index, index_scores, is_full, select_top_k
from sao_jax.sampler.attend import readable, stretched_attention
from sao_jax.sampler.cache import Cache


@flax.struct.dataclass
class LatentCache(Cache):
  """One vector per token and layer, for all heads, and one key of each indexer.

  Attributes:
    latent: [S, L, C, m], m = compressed numbers and rotary key.
    index: [S, F, C, i], F indexers; None without sparse attention.
  """

  POSITION_AXES: ClassVar = {"latent": 2, "index": 2}
  WEIGHTED: ClassVar = ("latent",)
  LOGICAL_AXES: ClassVar = ("slots",)  # a latent is for all heads: each device of "tensor" has it

  latent: Float[Array, "S L C m"]
  index: Float[Array, "S F C i"] | None

  @classmethod
  def empty(cls, config: ModelConfig, rows: int, length: int, dtype: jax.typing.DTypeLike) -> LatentCache:
    """Zeros for `rows` slots of `length` positions."""
    zeros = lambda layers, width: jnp.zeros((rows, layers, length, width), dtype)
    latent = zeros(config.num_layers, config.kv_lora_rank + config.qk_rope_head_dim)
    return cls(latent, zeros(sum(is_full(config)), config.index_head_dim) if config.index_topk else None)

  def attend(
    self, config: ModelConfig, lengths: Int[Array, " R"], step: Int[Array, ""] | int, num_new: int
  ) -> LatentAttend:
    """See `Cache.attend` and `cached_latent_attend`."""
    return cached_latent_attend(config, self, lengths, step, num_new)


def cached_latent_attend(
  config: ModelConfig, past: LatentCache, lengths: Int[Array, " R"], step: Int[Array, ""] | int, num_new: int
) -> LatentAttend:
  """Returns the `attend` of prefill and decode: absorbed attention.

  As in `kv_cache.cached_attend`, the carry is a `LatentCache` of the R rows with `num_new` positions for the tokens of
  this call, which go to positions step ... of it. Positions count through `past` first and then through the carry: of
  equal scores the earlier token wins, as in the learner. Positions that are not selected are masked, but still read.
  """
  window = past.num_positions

  def write(array: jax.Array, rows: jax.Array, layer: jax.Array) -> jax.Array:  # [R, L, N, m], [R, T, m]
    return jax.lax.dynamic_update_slice(array, rows[:, None].astype(array.dtype), (0, layer, step, 0))

  def stretches(old: jax.Array, new: jax.Array, layer: jax.Array, dtype: jnp.dtype) -> list[jax.Array]:
    both = (old, new) if window else (new,)
    return [jax.lax.dynamic_index_in_dim(x, layer, axis=1, keepdims=False).astype(dtype) for x in both]

  def allowed(num_queries: int) -> jax.Array:  # [R, T, W + N]
    in_past, in_new = readable(window, lengths, num_new, step, num_queries)
    shape = (lengths.shape[0], num_queries)
    parts = (jnp.broadcast_to(mask, (*shape, mask.shape[-1])) for mask in (in_past, in_new))
    return jnp.concatenate(list(parts), axis=-1)

  def select(index: Index, number: jax.Array, new: LatentCache) -> tuple[jax.Array, LatentCache]:
    new = new.replace(index=write(new.index, index.keys, number))
    keys = stretches(past.index, new.index, number, index.keys.dtype)
    scores = jnp.concatenate([index_scores(index.queries, index.weights, part) for part in keys], axis=-1)
    return select_top_k(scores, allowed(scores.shape[1]), config.index_topk), new

  def attend(
    q: jax.Array, latent: jax.Array, kv_b: jax.Array, selection: Selection, layer_index: jax.Array, new: LatentCache
  ) -> tuple[jax.Array, LatentCache]:
    new = new.replace(latent=write(new.latent, latent, layer_index))
    mask = allowed(q.shape[1]) if selection is None else selection
    queries = absorb(q, kv_b, config.qk_nope_head_dim)

    # Every head reads the latents themselves: as keys in full, as values their compressed numbers.
    parts = stretches(past.latent, new.latent, layer_index, q.dtype)
    masks = jnp.split(mask, [window], axis=-1) if window else [mask]
    keys_and_values = [
      (part.swapaxes(1, 2)[:, None], part[:, None, :, : config.kv_lora_rank], mask)
      for part, mask in zip(parts, masks, strict=True)
    ]
    weighted = stretched_attention(queries, keys_and_values, scale=q.shape[-1] ** -0.5)
    return absorbed_values(weighted, kv_b, config.qk_nope_head_dim), new

  return LatentAttend(window + num_new, select, attend)
