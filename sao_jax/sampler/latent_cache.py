"""The cache of latent attention: the latents of every token, which are never expanded, and the keys of indexers."""

from __future__ import annotations

from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
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
  equal scores the earlier token wins, as in the learner. Where positions are chosen, no other latents are read.
  """
  window, rank = past.num_positions, config.kv_lora_rank

  def write(array: jax.Array, rows: jax.Array, layer: jax.Array) -> jax.Array:  # [R, L, N, m], [R, T, m]
    return jax.lax.dynamic_update_slice(array, rows[:, None].astype(array.dtype), (0, layer, step, 0))

  def stretches(old: jax.Array, new: jax.Array, layer: jax.Array, dtype: jnp.dtype) -> list[jax.Array]:
    both = (old, new) if window else (new,)
    return [jax.lax.dynamic_index_in_dim(x, layer, axis=1, keepdims=False).astype(dtype) for x in both]

  def select(index: Index, number: jax.Array, new: LatentCache) -> tuple[Selection, LatentCache]:
    new = new.replace(index=write(new.index, index.keys, number))
    if not is_choosing(config, window + num_new):
      return None, new

    def allowed(positions: jax.Array) -> jax.Array:  # [R, Q] of the carry -> [R, Q, W + N]
      past_ones = jnp.arange(window, dtype=jnp.int32) < lengths[:, None, None]
      new_ones = jnp.arange(num_new, dtype=jnp.int32) <= positions[..., None]
      past_ones = jnp.broadcast_to(past_ones, (*positions.shape, window))
      return jnp.concatenate([past_ones, new_ones], axis=-1)

    keys = stretches(past.index, new.index, number, index.keys.dtype)
    shape = index.weights.shape[:2]
    positions = jnp.broadcast_to(step + jnp.arange(shape[1], dtype=jnp.int32), shape)
    return choose_positions(index.queries, index.weights, keys, allowed, config.index_topk, positions), new

  def attend(
    q: jax.Array, latent: jax.Array, kv_b: jax.Array, selection: Selection, layer_index: jax.Array, new: LatentCache
  ) -> tuple[jax.Array, LatentCache]:
    new = new.replace(latent=write(new.latent, latent, layer_index))
    queries, scale = absorb(q, kv_b, config.qk_nope_head_dim), score_scale(config)

    if selection is None:
      # Every head reads the latents themselves: as keys in full, as values their compressed numbers.
      parts = stretches(past.latent, new.latent, layer_index, q.dtype)
      masks = readable(window, lengths, num_new, step, q.shape[1])
      keys_and_values = [
        (part.swapaxes(1, 2)[:, None], part[:, None, :, :rank], mask)
        for part, mask in zip(parts, masks[-len(parts) :], strict=True)
      ]
      weighted = stretched_attention(queries, keys_and_values, scale=scale)
    else:

      def gather(positions: jax.Array) -> jax.Array:  # [R, Q, k] -> [R, Q, k, m]
        rows = take_latents(new.latent, layer_index, positions - window)
        if window:
          in_past = (positions < window)[..., None]
          rows = jnp.where(in_past, take_latents(past.latent, layer_index, positions), rows)
        return rows.astype(q.dtype)

      weighted = read_selected(queries, gather, selection, rank, scale)
    return absorbed_values(weighted, kv_b, config.qk_nope_head_dim), new

  return LatentAttend(window + num_new, select, attend)


def take_latents(
  latents: Float[Array, "R L C m"], layer: Int[Array, ""], positions: Int[Array, "R Q k"]
) -> Float[Array, "R Q k m"]:
  """The latents of a layer at some positions, clipped to valid ones; no others are read."""
  rows, _, length, width = latents.shape
  of_layers = latents.reshape(rows, -1, width)
  index = layer * length + jnp.clip(positions, 0, length - 1)
  return jax.vmap(lambda row, index: jnp.take(row, index, axis=0))(of_layers, index)
