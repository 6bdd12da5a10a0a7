"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).

A token's keys and values are one small vector, its latent of m = R + r numbers: R compressed ones, c, from which every
head derives a key and a value, and a rotary key of r numbers that all heads share. Head h reads the key (c W_h, rotary)
and the value c U_h, where kv_b holds W and U of all heads. Two forms of the same attention:

* expanded, to train where every position is read: build every head's keys and values, then ordinary attention;
* absorbed, to sample, and where positions are chosen: since q · (c W_h) = (q W_hᵀ) · c, multiply the query instead and
  attend over the latents themselves, all heads over the same one; U_h follows after the weighted sum. The cache holds
  latents only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.attention.kind import ATTENTION_OUT, PASSED, AttentionKind
from sao_jax.models.attention.packed import packed_attention, shard_attention
from sao_jax.models.attention.packed_latent import packed_choice, packed_selected_attention
from sao_jax.models.attention.shards import attend_stretch, gather_sequence
from sao_jax.models.attention.sparse import (
  Index,
  index,
  indexer_paths,
  indexer_specs,
  is_full,
)
from sao_jax.models.linear import linear, rms_norm
from sao_jax.models.rope import apply_interleaved_rope, yarn_mscale
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.params import Params, ParamSpec, Specs, stack_specs

LATENT_NORM_EPS = 1e-6  # of the two norms in here, whatever rms_norm_eps is, as transformers has it


def latent_specs(config: ModelConfig) -> Specs:
  """The parameters of one layer: queries and key-values, each through a narrow normalised vector, and the output."""
  spec = functools.partial(ParamSpec, dtype=config.param_dtype, stddev=config.initializer_range)
  dim, heads, q_rank, rank = config.d_model, config.num_heads, config.q_lora_rank, config.kv_lora_rank
  plain, rotary, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
  norm = lambda width: spec((width,), (None,), "ones", compute_dtype="float32")
  return {
    "q_a": spec((dim, q_rank), ("embed", None)),
    "q_a_norm": norm(q_rank),
    "q_b": spec((q_rank, heads, plain + rotary), ("latent", "heads", None)),
    "kv_a": spec((dim, rank + rotary), ("embed", None)),
    "kv_a_norm": norm(rank),
    "kv_b": spec((rank, heads, plain + value), ("latent", "heads", None)),
    "o": spec((heads, value, dim), ("heads", None, "embed")),
  }


def score_scale(config: ModelConfig) -> float:
  """The factor on the scores: 1 / sqrt(q), of a context stretched by YaRN more, as DeepSeek-V3 has it."""
  width = config.qk_nope_head_dim + config.qk_rope_head_dim
  return width**-0.5 * yarn_mscale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2


def latent_queries(
  params: Params,
  x: Float[Array, "B T D"],
  table: tuple[Array, Array],
  config: ModelConfig,
  layout: Layout = ONE_DEVICE,
) -> tuple[Float[Array, "B T H q"], Float[Array, "B T Q"]]:
  """The queries, n plain numbers and r rotated ones per head, and the compressed vector that they come from."""
  compressed = rms_norm(linear(x, params["q_a"], layout), params["q_a_norm"], LATENT_NORM_EPS)
  plain, rotary = jnp.split(linear(compressed, params["q_b"], layout), [config.qk_nope_head_dim], axis=-1)
  return jnp.concatenate([plain, apply_interleaved_rope(rotary, table)], axis=-1), compressed


def latent_keys(
  params: Params,
  x: Float[Array, "B T D"],
  table: tuple[Array, Array],
  config: ModelConfig,
  layout: Layout = ONE_DEVICE,
) -> Float[Array, "B T m"]:
  """The latent of every token: compressed and normalised, then the rotated key."""
  compressed, rotary = jnp.split(linear(x, params["kv_a"], layout), [config.kv_lora_rank], axis=-1)
  rotary = apply_interleaved_rope(rotary[:, :, None], table)[:, :, 0]
  return jnp.concatenate([rms_norm(compressed, params["kv_a_norm"], LATENT_NORM_EPS), rotary], axis=-1)


def expand(
  latent: Float[Array, "B S m"], kv_b: Float[Array, "R H e"], plain_dim: int, layout: Layout = ONE_DEVICE
) -> tuple[Float[Array, "B S H q"], Float[Array, "B S H v"]]:
  """Keys and values of every head; `plain_dim` is n."""
  compressed, rotary = jnp.split(latent, [kv_b.shape[0]], axis=-1)
  plain, values = jnp.split(linear(compressed, kv_b, layout), [plain_dim], axis=-1)
  rotary = jnp.broadcast_to(rotary[:, :, None], (*plain.shape[:3], rotary.shape[-1]))
  return jnp.concatenate([plain, rotary], axis=-1), values


def absorb(q: Float[Array, "B T H q"], kv_b: Float[Array, "R H e"], plain_dim: int) -> Float[Array, "B T H m"]:
  """Queries whose product with a latent is that of `q` with the latent's expanded key."""
  plain, rotary = jnp.split(q, [plain_dim], axis=-1)
  weight = kv_b[..., :plain_dim].astype(q.dtype)
  absorbed = jnp.einsum("bthn,rhn->bthr", plain, weight, preferred_element_type=jnp.float32)
  return jnp.concatenate([absorbed.astype(q.dtype), rotary], axis=-1)


def absorbed_values(
  weighted: Float[Array, "B T H R"], kv_b: Float[Array, "R H e"], plain_dim: int
) -> Float[Array, "B T H v"]:
  """The weighted sum of expanded values, from that of the compressed vectors."""
  weight = kv_b[..., plain_dim:].astype(weighted.dtype)
  values = jnp.einsum("bthr,rhv->bthv", weighted, weight, preferred_element_type=jnp.float32)
  return values.astype(weighted.dtype)


# The positions that each token reads, then -1; None: all that it may.
Selection = Int[Array, "B T k"] | None


@dataclasses.dataclass(frozen=True)
class LatentAttend:
  """Says what the queries of a call read, and keeps latents if it wants to.

  Attributes:
    num_positions: S, the number of positions that there may be to read; up to index_topk all are, and none is chosen.
    select: (index, number of the indexer, carry) -> (selection, carry).
    attend: (q [B, T, H, q], latent [B, T, m], kv_b, selection, layer_index, carry) -> (out [B, T, H, v], carry).
  """

  num_positions: int
  select: Callable[[Index, jax.Array, Any], tuple[jax.Array, Any]]
  attend: Callable[..., tuple[jax.Array, Any]]


def packed_latent_attend(
  config: ModelConfig, segment_ids: Int[Array, "B T"], layout: Layout = ONE_DEVICE
) -> LatentAttend:
  """Returns the `attend` of packed rows, causal within segments, carry untouched.

  Where there is a choice of positions attention is absorbed and reads those only, otherwise it is expanded. Padding
  reads and gives nothing.
  """
  real = (segment_ids > 0)[..., None]
  plain, length, scale = config.qk_nope_head_dim, segment_ids.shape[1], score_scale(config)

  # Choice and attention are both by the index in the row, and both causal within segments.
  def select(index: Index, number: jax.Array, carry: Any) -> tuple[Selection, Any]:
    del number
    return packed_choice(index, segment_ids, config.index_topk, layout) if is_choosing(config, length) else None, carry

  def attend(
    q: jax.Array, latent: jax.Array, kv_b: jax.Array, selection: Selection, layer_index: jax.Array, carry: Any
  ) -> tuple[jax.Array, Any]:
    del layer_index
    latent = jnp.where(real, latent, 0)  # weights on padding are 0, but 0 · NaN is NaN
    if selection is None:
      return expanded_attention(q, latent, kv_b, segment_ids, plain, scale, layout), carry
    weighted = packed_selected_attention(absorb(q, kv_b, plain), latent, selection, config.kv_lora_rank, scale, layout)
    return jnp.where(real[..., None], absorbed_values(weighted, kv_b, plain), 0), carry

  return LatentAttend(length, select, attend)


def expanded_attention(
  q: Float[Array, "B T H q"],
  latent: Float[Array, "B T m"],
  kv_b: Float[Array, "R H e"],
  segment_ids: Int[Array, "B T"],
  plain_dim: int,
  scale: float,
  layout: Layout,
) -> Float[Array, "B T H v"]:
  """Attention over all earlier latents of the segment, expanded to the keys and values of every head.

  Over the mesh axes of the sequence latents are gathered and expanded on every device: keys and values are many times
  larger, and so are their gradients.
  """
  if layout.shards("sequence") == 1:
    return packed_attention(layout)(q, *expand(latent, kv_b, plain_dim, layout), segment_ids, scale)

  def local(q: jax.Array, latent: jax.Array, kv_b: jax.Array, segments: jax.Array) -> jax.Array:
    k, v = expand(gather_sequence(latent, layout), kv_b, plain_dim, layout)
    return attend_stretch(shard_attention(layout), q, k, v, segments, scale, layout)

  # Padding reads and gives nothing, as in `packed_attention`.
  real = (segment_ids > 0)[..., None, None]
  heads = layout.spec("batch", "sequence", "heads", None)
  specs = (
    heads,
    layout.spec("batch", "sequence", None),
    layout.spec(None, "heads", None),
    layout.spec("batch", "sequence"),
  )
  attend = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=heads, check_vma=False)
  out = attend(jnp.where(real, q, 0), latent, kv_b.astype(q.dtype), segment_ids)
  return jnp.where(real, out, 0)


@jax.named_scope("attention")
def latent_layer(
  params: Params,
  x: Float[Array, "B T D"],
  table: tuple[jax.Array, jax.Array],
  config: ModelConfig,
  attend: LatentAttend,
  layer_index: jax.Array,
  carry: Any,
  *,
  common: Params,
  passed: Selection,
  chosen: bool = False,
  layout: Layout = ONE_DEVICE,
) -> tuple[Float[Array, "B T D"], Any, Selection]:
  """Queries and latents of the tokens, the choice of what they read, `attend`, output; see `kind.AttentionLayer`.

  With sparse attention `passed` is the selection of the layer before; a layer without an indexer of its own reads it
  again, and passes it on. Where every layer chooses for itself, nothing is passed.
  """
  q, compressed = latent_queries(params, x, table, config, layout)
  latent = latent_keys(params, x, table, config, layout)
  selection = passed

  if config.index_topk and not chosen:
    # Indexers are stacked over the layers that have one: `number` counts those up to this layer.
    full = np.asarray(is_full(config))
    number = jnp.asarray(np.cumsum(full) - 1, jnp.int32)[layer_index]

    def choose() -> tuple[jax.Array, Any]:
      take = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False)
      own = jax.tree.map(take, common["indexer_layers"])
      return attend.select(index(own, x, compressed, table, config, layout), number, carry)

    # Named, so that the backward pass need not choose again; there is no selection where every position is read.
    named = lambda selection, name: None if selection is None else checkpoint_name(selection, name)
    if full.all():
      selection, carry = choose()
      selection = named(selection, ATTENTION_OUT)
    else:
      keep = lambda: (selection, carry)
      selection, carry = jax.lax.cond(jnp.asarray(full)[layer_index], choose, keep)
      passed = selection = named(selection, PASSED)

  # Absorbed or expanded, `attend` decides; heads are then joined and projected back.
  out, carry = attend.attend(q, latent, params["kv_b"], selection, layer_index, carry)
  out = linear(out.reshape(*x.shape[:2], -1), params["o"].reshape(-1, x.shape[-1]), layout)
  return out, carry, passed


def is_choosing(config: ModelConfig, num_positions: int) -> bool:
  """Are there more positions than a query may read?"""
  return 0 < config.index_topk < num_positions


def no_selection(config: ModelConfig, attend: LatentAttend, batch: int, length: int) -> Selection:
  """Returns the selection that is passed to the first layer, which replaces it; None where no layer reads another's."""
  if all(is_full(config)) or not is_choosing(config, attend.num_positions):
    return None
  return jnp.zeros((batch, length, config.index_topk), jnp.int32)


def indexer_stack(config: ModelConfig) -> Specs:
  """The indexers of sparse attention, a stack of their own with one entry for each layer that has one."""
  return {"indexer_layers": stack_specs(indexer_specs(config), sum(is_full(config)))} if config.index_topk else {}


LATENT = AttentionKind(
  specs=latent_specs,
  layer=latent_layer,
  packed=packed_latent_attend,
  rotary_dim=lambda config: config.qk_rope_head_dim,
  names=("q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "o"),
  matrices={"q_a": 1, "q_b": 1, "kv_a": 1, "kv_b": 1, "o": 2},
  common_specs=indexer_stack,
  start=no_selection,
  replaces=is_full,
  fixed=indexer_paths,
)
