"""Decode of a shallow model on a CPU: straight code, whose layers have their weights and their window to themselves.

XLA on a CPU copies what it slices, in every turn of a loop. So each layer's part of the window is cut out once per
call, with room for the call's own tokens behind it: a step writes its keys and values there and attends once, over
past and new tokens together.

Most of a step is reading the window. Where half of the rows are so short that a window of half the length holds them,
they have that one.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from sao_jax.config import ModelConfig
from sao_jax.models.attention import attention_kind
from sao_jax.models.attention.grouped import GROUPED, GroupedAttend
from sao_jax.models.transformer import UNROLLED_LAYERS
from sao_jax.parallel.layout import Layout
from sao_jax.sampler.attend import readable, stretched_attention
from sao_jax.sampler.kv_cache import KVCache

Joined = tuple[
  tuple[KVCache, ...], ...
]  # of every layer and part of the rows: k [r, K, h, w + N] and v [r, K, w + N, h], w past positions and N new ones


def runs_straight(config: ModelConfig, layout: Layout) -> bool:
  """True if `decode` has straight code, without LoRA's factors: few layers of grouped attention on one CPU device."""
  shallow = config.num_layers <= UNROLLED_LAYERS and attention_kind(config) is GROUPED
  return shallow and layout.platform == "cpu" and not layout.is_sharded


def short_window(windows: Sequence[int], window: int) -> int:
  """The window of the shorter half of a call's rows: the largest of at most half of `window`; 0 if there is none.

  >>> short_window((64, 128, 192), 192), short_window((64, 128, 192), 64)
  (64, 0)
  """
  return max((each for each in windows if 2 * each <= window), default=0)


def join_layers(parts: Sequence[KVCache], max_steps: int) -> Joined:
  """The window of every layer, and room for `max_steps` tokens behind it, of the rows in these parts."""

  def cut(past: KVCache, layer: int) -> KVCache:
    k, v = past.k[:, layer], past.v[:, layer]
    return KVCache(
      k=jnp.pad(k, ((0, 0), (0, 0), (0, 0), (0, max_steps))), v=jnp.pad(v, ((0, 0), (0, 0), (0, max_steps), (0, 0)))
    )

  return tuple(tuple(cut(past, layer) for past in parts) for layer in range(parts[0].k.shape[1]))


def new_positions(joined: Joined, max_steps: int) -> KVCache:
  """The rows written behind the windows, as a cache of all layers."""
  k, v = (
    [[cut(getattr(part, name)) for part in parts] for parts in joined]
    for name, cut in (("k", lambda k: k[..., -max_steps:]), ("v", lambda v: v[..., -max_steps:, :]))
  )
  stack = lambda layers: jnp.stack([jnp.concatenate(parts) for parts in layers], axis=1)
  return KVCache(k=stack(k), v=stack(v))


def joined_attend(lengths: Int[Array, " R"], max_steps: int, step: Int[Array, ""]) -> GroupedAttend:
  """Returns the `attend` of a step: as `kv_cache.cached_attend`, with one token per row."""

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer_index: int, joined: Joined) -> tuple[jax.Array, Joined]:
    # Rows of each part have a window of their own.
    first, outs, parts = 0, [], []
    for part in joined[layer_index]:
      rows = slice(first, first + part.num_slots)
      out, part = read(q[rows], k[rows], v[rows], lengths[rows], part)
      first, outs, parts = rows.stop, [*outs, out], [*parts, part]
    return jnp.concatenate(outs), (*joined[:layer_index], tuple(parts), *joined[layer_index + 1 :])

  def read(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, own: KVCache) -> tuple[jax.Array, KVCache]:
    window = own.k.shape[-1] - max_steps
    own = KVCache(
      k=jax.lax.dynamic_update_slice_in_dim(own.k, jnp.moveaxis(k, 1, -1).astype(own.k.dtype), window + step, axis=3),
      v=jax.lax.dynamic_update_slice_in_dim(own.v, jnp.moveaxis(v, 1, 2).astype(own.v.dtype), window + step, axis=2),
    )
    in_past, in_new = readable(window, lengths, max_steps, step, 1)
    mask = jnp.concatenate([in_past, jnp.broadcast_to(in_new, (*in_past.shape[:2], in_new.shape[2]))], axis=2)
    return stretched_attention(q, [(own.k, own.v, mask)]), own

  return attend
