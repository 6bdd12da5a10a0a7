"""Grouped-query attention (arXiv 2305.13245): H heads of queries share K heads of keys and values."""

from __future__ import annotations

import functools
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.attention.kind import AttentionKind
from sao_jax.models.attention.packed import packed_attention
from sao_jax.models.linear import linear, rms_norm
from sao_jax.models.rope import apply_rope
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.params import Params, ParamSpec, Specs


@runtime_checkable
class GroupedAttend(Protocol):
  """Says what the queries of a call read, and keeps keys and values if it wants to."""

  def __call__(
    self,
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    layer_index: jax.Array,
    carry: Any,
  ) -> tuple[Float[Array, "B T H h"], Any]:
    """Returns what the heads have read, and the next carry."""


def grouped_specs(config: ModelConfig) -> Specs:
  """The parameters of one layer; q/k norms and biases only if the model has them."""
  spec = functools.partial(ParamSpec, dtype=config.param_dtype, stddev=config.initializer_range)
  dim, heads, kv_heads, head_dim = config.d_model, config.num_heads, config.num_kv_heads, config.head_dim

  specs = {
    "q": spec((dim, heads, head_dim), ("embed", "heads", None)),
    "k": spec((dim, kv_heads, head_dim), ("embed", "kv_heads", None)),
    "v": spec((dim, kv_heads, head_dim), ("embed", "kv_heads", None)),
    "o": spec((heads, head_dim, dim), ("heads", None, "embed")),
  }
  if config.qk_norm:  # read in fp32, as all norms
    specs |= {name: spec((head_dim,), (None,), "ones", compute_dtype="float32") for name in ("q_norm", "k_norm")}
  if config.attention_bias:
    specs |= {
      "q_bias": spec((heads, head_dim), ("heads", None), "zeros"),
      "k_bias": spec((kv_heads, head_dim), ("kv_heads", None), "zeros"),
      "v_bias": spec((kv_heads, head_dim), ("kv_heads", None), "zeros"),
    }
  if config.attention_out_bias:
    specs["o_bias"] = spec((dim,), (None,), "zeros")
  return specs


@jax.named_scope("attention")
def grouped_layer(
  params: Params,
  x: Float[Array, "B T D"],
  table: tuple[jax.Array, jax.Array],
  config: ModelConfig,
  attend: GroupedAttend,
  layer_index: jax.Array,
  carry: Any,
  *,
  common: Params,
  passed: None,
  chosen: bool = False,
  layout: Layout = ONE_DEVICE,
) -> tuple[Float[Array, "B T D"], Any, None]:
  """Projections, optional biases and q/k norm, rotary embedding, `attend`, output; see `kind.AttentionLayer`."""
  del common, passed, chosen
  q, k, v = (linear(x, params[name], layout) for name in ("q", "k", "v"))
  if config.attention_bias:
    q, k, v = (part + params[name].astype(x.dtype) for part, name in ((q, "q_bias"), (k, "k_bias"), (v, "v_bias")))
  if config.qk_norm:
    q = rms_norm(q, params["q_norm"], config.rms_norm_eps)
    k = rms_norm(k, params["k_norm"], config.rms_norm_eps)
  out, carry = attend(apply_rope(q, table), apply_rope(k, table), v, layer_index, carry)
  out = linear(out.reshape(*x.shape[:2], -1), params["o"].reshape(-1, x.shape[-1]), layout)
  return out + params["o_bias"].astype(x.dtype) if config.attention_out_bias else out, carry, None


def packed_attend(segment_ids: Int[Array, "B T"], layout: Layout = ONE_DEVICE) -> GroupedAttend:
  """Returns the `attend` of packed rows: causal within segments, carry untouched."""
  attention = packed_attention(layout)

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer_index: jax.Array, carry: Any) -> tuple[jax.Array, Any]:
    del layer_index
    return attention(q, k, v, segment_ids), carry

  return attend


GROUPED = AttentionKind(
  specs=grouped_specs,
  layer=grouped_layer,
  packed=lambda config, segment_ids, layout: packed_attend(segment_ids, layout),
  rotary_dim=lambda config: int(config.head_dim * config.rotary_fraction),
  names=("q", "k", "v", "o", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "o_bias"),
  matrices={"q": 1, "k": 1, "v": 1, "o": 2},
)
