"""Decode of a shallow model on a CPU: straight code, whose layers have their weights and their window to themselves.

XLA on a CPU copies what it slices, in every turn of a loop. So each layer's part of the window is cut out once per
call, with room for the call's own tokens behind it: a step writes its keys and values there and attends once, over
past and new tokens together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from sao_jax.config import ModelConfig
from sao_jax.models.attention import attention_kind
from sao_jax.models.attention.grouped import GROUPED, GroupedAttend
from sao_jax.models.transformer import UNROLLED_LAYERS
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.params import Params
from sao_jax.sampler.attend import readable, stretched_attention
from sao_jax.sampler.kv_cache import KVCache

Joined = tuple[
  KVCache, ...
]  # of every layer: k [R, K, h, W + N] and v [R, K, W + N, h], W past positions and N new ones


def runs_straight(params: Params, config: ModelConfig, layout: Layout) -> bool:
  """True if `decode` has straight code: few layers of grouped attention on one CPU device, without LoRA's factors."""
  shallow = config.num_layers <= UNROLLED_LAYERS and attention_kind(config) is GROUPED
  return shallow and layout.platform == "cpu" and not layout.is_sharded and "lora" not in params


def join_layers(past: KVCache, new: KVCache) -> Joined:
  """The window of every layer, and room behind it."""
  k, v = jnp.concatenate([past.k, new.k], axis=4), jnp.concatenate([past.v, new.v], axis=3)
  return tuple(KVCache(k=k[:, layer], v=v[:, layer]) for layer in range(k.shape[1]))


def new_positions(joined: Joined, window: int) -> KVCache:
  """The rows written behind the windows, as a cache of all layers."""
  return KVCache(
    k=jnp.stack([layer.k[..., window:] for layer in joined], axis=1),
    v=jnp.stack([layer.v[..., window:, :] for layer in joined], axis=1),
  )


def joined_attend(lengths: Int[Array, " R"], window: int, step: Int[Array, ""]) -> GroupedAttend:
  """Returns the `attend` of a step: as `kv_cache.cached_attend`, with one token per row."""

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer_index: int, joined: Joined) -> tuple[jax.Array, Joined]:
    own = joined[layer_index]
    own = KVCache(
      k=jax.lax.dynamic_update_slice_in_dim(own.k, jnp.moveaxis(k, 1, -1).astype(own.k.dtype), window + step, axis=3),
      v=jax.lax.dynamic_update_slice_in_dim(own.v, jnp.moveaxis(v, 1, 2).astype(own.v.dtype), window + step, axis=2),
    )
    in_past, in_new = readable(window, lengths, own.k.shape[-1] - window, step, 1)
    mask = jnp.concatenate([in_past, jnp.broadcast_to(in_new, (*in_past.shape[:2], in_new.shape[2]))], axis=2)
    out = stretched_attention(q, [(own.k, own.v, mask)])
    return out, (*joined[:layer_index], own, *joined[layer_index + 1 :])

  return attend
