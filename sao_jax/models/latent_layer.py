"""The attention of a layer with latents (MLA) and, where configured, a choice of what they read (DSA).

Layers without an indexer of their own read what the last layer with one chose (IndexShare, arXiv 2603.12201): the
selection travels from layer to layer beside the hidden states. The indexers of all full layers are one stack of their
own, since a scanned layer must look like its neighbours; nothing is differentiated through them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.attention import packed_attention, packed_causal_mask
from sao_jax.models.latent_attention import expand, latent_keys, latent_queries
from sao_jax.models.linear import linear
from sao_jax.models.sparse_attention import Index, index, index_scores, is_full, select_top_k
from sao_jax.parallel.params import Params
from sao_jax.parallel.rules import DEFAULT_RULES, AxisRules

Selection = Bool[Array, "B T S"] | None


@dataclasses.dataclass(frozen=True)
class LatentAttend:
  """What the queries of a call read, as `transformer.Attend` for layers with keys and values.

  Attributes:
    num_positions: S, the positions that may be there to read.
    select: (index, number of the indexer, carry) -> (selection [B, T, S], carry).
    attend: (q [B, T, H, q], latent [B, T, m], kv_b, selection or None, layer_index, carry) -> (out [B, T, H, v],
      carry).
  """

  num_positions: int
  select: Callable[[Index, jax.Array, Any], tuple[jax.Array, Any]]
  attend: Callable[..., tuple[jax.Array, Any]]


def packed_latent_attend(
  segment_ids: Int[Array, "B T"], config: ModelConfig, mesh: Mesh | None = None, rules: AxisRules = DEFAULT_RULES
) -> LatentAttend:
  """For packed rows: expanded attention, causal within segments, carry untouched."""
  mask = packed_causal_mask(segment_ids)
  attention = packed_attention(mesh, rules)

  def select(index: Index, number: jax.Array, carry: Any) -> tuple[jax.Array, Any]:
    del number
    return select_top_k(index_scores(index.queries, index.weights, index.keys), mask, config.index_topk), carry

  def attend(
    q: jax.Array, latent: jax.Array, kv_b: jax.Array, selection: Selection, layer_index: jax.Array, carry: Any
  ) -> tuple[jax.Array, Any]:
    del layer_index
    k, v = expand(latent, kv_b, config.qk_nope_head_dim)
    return attention(q, k, v, mask if selection is None else selection), carry

  return LatentAttend(segment_ids.shape[1], select, attend)


def no_selection(config: ModelConfig, attend: Any, batch: int, length: int) -> Selection:
  """What travels through the layers before the first one has chosen; None where nothing is ever chosen."""
  return jnp.zeros((batch, length, attend.num_positions), jnp.bool_) if config.index_topk else None


def latent_attention(
  params: Params,
  x: Float[Array, "B T D"],
  table: tuple[jax.Array, jax.Array],
  config: ModelConfig,
  attend: LatentAttend,
  layer_index: jax.Array,
  carry: Any,
  *,
  indexers: Params | None,
  selection: Selection,
) -> tuple[Float[Array, "B T D"], Any, Selection]:
  """Queries and latents of the tokens, the positions that they read, and whatever `attend` does with them.

  Args:
    params: of the layer, as `latent_specs` declares them.
    x: normalised hidden states.
    table: rotary angles of the tokens, for config.qk_rope_head_dim.
    config: static.
    attend: what queries read.
    layer_index: index of the layer, traced.
    carry: state of `attend`.
    indexers: the stack of all indexers, None without sparse attention.
    selection: of the layer before.
  """
  q, compressed = latent_queries(params, x, table, config)
  latent = latent_keys(params, x, table, config)
  if config.index_topk:
    full = np.asarray(is_full(config))
    number = jnp.asarray(np.cumsum(full) - 1, jnp.int32)[layer_index]

    def choose() -> tuple[jax.Array, Any]:
      own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), indexers)
      return attend.select(index(own, x, compressed, table, config), number, carry)

    if full.all():
      selection, carry = choose()
    else:
      keep = lambda: (selection, carry)
      selection, carry = jax.lax.cond(jnp.asarray(full)[layer_index], choose, keep)
  out, carry = attend.attend(q, latent, params["kv_b"], selection, layer_index, carry)
  return linear(out.reshape(*x.shape[:2], -1), params["o"].reshape(-1, x.shape[-1])), carry, selection
