"""The decoder-only transformer: one parameter layout and one forward pass for training, sampling and the critic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.latent_attention import LatentAttend, latent_attention, latent_specs, no_selection
from sao_jax.models.linear import feed_forward, linear, rms_norm
from sao_jax.models.lora import add_lora, lora_of
from sao_jax.models.moe import Routed, moe_feed_forward
from sao_jax.models.rope import apply_rope, rope_table
from sao_jax.models.sparse_attention import indexer_specs, is_full
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.params import Params, ParamSpec, Specs, stack_specs

UNROLLED_LAYERS = 4  # without remat a stack this shallow becomes straight code: no copies of stacked activations

# attend(q [B,T,H,h], k [B,T,K,h], v [B,T,K,h], layer_index, carry) -> (out [B,T,H,h], carry); of latents a LatentAttend
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]] | LatentAttend


def attention_specs(config: ModelConfig) -> Specs:
  """The parameters of grouped-query attention, of one layer."""
  spec = functools.partial(ParamSpec, dtype=config.param_dtype, stddev=config.initializer_range)
  dim, heads, kv_heads, head_dim = config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
  specs = {
    "q": spec((dim, heads, head_dim), ("embed", "heads", None)),
    "k": spec((dim, kv_heads, head_dim), ("embed", "kv_heads", None)),
    "v": spec((dim, kv_heads, head_dim), ("embed", "kv_heads", None)),
    "o": spec((heads, head_dim, dim), ("heads", None, "embed")),
  }
  if config.qk_norm:
    specs |= {name: spec((head_dim,), (None,), "ones", compute_dtype="float32") for name in ("q_norm", "k_norm")}
  if config.attention_bias:
    specs |= {
      "q_bias": spec((heads, head_dim), ("heads", None), "zeros"),
      "k_bias": spec((kv_heads, head_dim), ("kv_heads", None), "zeros"),
      "v_bias": spec((kv_heads, head_dim), ("kv_heads", None), "zeros"),
    }
  return specs


def param_specs(config: ModelConfig) -> Specs:
  """The declared parameters. Layers are stacked along a leading axis [L, ...]: first the dense ones, then the MoE ones.

  {"embed": [V,D], "dense_layers"?, "moe_layers"?, "indexer_layers"?, "final_norm": [D], "head"?: [D,V]}; "head" only if
  it is not tied. The indexers of sparse attention are a stack of their own, one for each layer that has one.
  """
  spec = functools.partial(ParamSpec, dtype=config.param_dtype, stddev=config.initializer_range)
  dim = config.d_model
  norm = spec((dim,), (None,), "ones", compute_dtype="float32")
  attention = latent_specs(config) if config.kv_lora_rank else attention_specs(config)

  def gated(width: int) -> Specs:
    inward, outward = spec((dim, width), ("embed", "mlp")), spec((width, dim), ("mlp", "embed"))
    return {"gate": inward, "up": inward, "down": outward}

  layer = {"attention_norm": norm, "attention": attention, "mlp_norm": norm}
  num_dense = config.num_dense_layers if config.num_experts else config.num_layers
  specs = {"embed": spec((config.vocab_size, dim), ("vocab", "embed")), "final_norm": norm}
  if num_dense:
    specs["dense_layers"] = stack_specs(layer | {"mlp": gated(config.d_ff)}, num_dense)
  if num_dense < config.num_layers:
    experts, width = config.num_experts, config.d_ff_expert
    # Sigmoid routers are kept in fp32, whatever the rest is, as transformers does.
    router = "float32" if config.router == "sigmoid" else config.param_dtype
    moe = {
      "router": spec((dim, experts), ("embed", None), dtype=router, compute_dtype="float32"),
      "gate": spec((experts, dim, width), ("expert", "embed", "mlp")),
      "up": spec((experts, dim, width), ("expert", "embed", "mlp")),
      "down": spec((experts, width, dim), ("expert", "mlp", "embed")),
    }
    if config.router == "sigmoid":
      moe["correction_bias"] = ParamSpec((experts,), (None,), "zeros", "float32", compute_dtype="float32")
    if config.d_ff_shared:
      moe["shared"] = gated(config.d_ff_shared)
    specs["moe_layers"] = stack_specs(layer | {"moe": moe}, config.num_layers - num_dense)
  if config.index_topk:
    specs["indexer_layers"] = stack_specs(indexer_specs(config), sum(is_full(config)))
  if not config.tie_embeddings:
    specs["head"] = spec((dim, config.vocab_size), ("embed", "vocab"))
  return specs


def attention(
  params: Params,
  x: Float[Array, "B T D"],
  table: tuple[jax.Array, jax.Array],
  config: ModelConfig,
  attend: Attend,
  layer_index: jax.Array,
  carry: Any,
) -> tuple[Float[Array, "B T D"], Any]:
  """Projections, optional biases and q/k norm, rotary embedding, and whatever `attend` does with q, k and v."""
  q, k, v = (linear(x, params[name]) for name in ("q", "k", "v"))
  if config.attention_bias:
    q, k, v = (part + params[name].astype(x.dtype) for part, name in ((q, "q_bias"), (k, "k_bias"), (v, "v_bias")))
  if config.qk_norm:
    q = rms_norm(q, params["q_norm"], config.rms_norm_eps)
    k = rms_norm(k, params["k_norm"], config.rms_norm_eps)
  out, carry = attend(apply_rope(q, table), apply_rope(k, table), v, layer_index, carry)
  return linear(out.reshape(*x.shape[:2], -1), params["o"].reshape(-1, x.shape[-1])), carry


def trunk(
  params: Params,
  config: ModelConfig,
  token_ids: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  *,
  attend: Attend,
  carry: Any = None,
  routed_experts: Int[Array, "B T L k"] | None = None,
  layout: Layout = ONE_DEVICE,
) -> tuple[Float[Array, "B T D"], Any, Routed | None]:
  """Embedding, all layers, final norm.

  Args:
    params: the tree that `param_specs(config)` declares ("head" is not read), perhaps with "lora", see `lora`.
    config: static.
    token_ids: the tokens.
    positions: the rotary position of every token.
    attend: what a layer's queries read: `attend(q, k, v, layer_index, carry) -> (out, carry)`. Training passes causal
      attention within segments, the sampler one that writes k and v into its cache and attends over it.
    carry: state that `attend` threads through the layers, for example the cache.
    routed_experts: the experts to use in the MoE layers, -1 where the router chooses itself (None: everywhere).
    layout: the one that parameters and tokens are placed by.

  Returns:
    The hidden states after the final norm, in config.dtype; the last carry; and how the MoE layers routed the tokens,
    stacked [L, B, T, ...] over these layers, None without one.
  """
  rotary_dim = config.qk_rope_head_dim or int(config.head_dim * config.rotary_fraction)
  table = rope_table(positions, rotary_dim, config.rope_theta, config.yarn)
  x = layout.constrain(params["embed"][token_ids].astype(config.dtype), "batch", "sequence", None)

  indexers = params.get("indexer_layers")
  selection = no_selection(config, attend, *token_ids.shape)  # what sparse attention reads, from one layer to the next

  scale = params["lora"]["scale"] if "lora" in params else None

  def layer(state: tuple[jax.Array, Any, Any], inputs: tuple[Params, Params, jax.Array, jax.Array | None]):
    x, carry, selection = state
    params, lora, layer_index, replayed = inputs
    params, routed = add_lora(params, lora, scale), None
    normed = rms_norm(x, params["attention_norm"], config.rms_norm_eps)
    if config.kv_lora_rank:
      layer_attention = functools.partial(latent_attention, indexers=indexers, selection=selection)
      out, carry, selection = layer_attention(params["attention"], normed, table, config, attend, layer_index, carry)
    else:
      out, carry = attention(params["attention"], normed, table, config, attend, layer_index, carry)
    x = x + out
    normed = rms_norm(x, params["mlp_norm"], config.rms_norm_eps)
    if "moe" in params:
      out, routed = moe_feed_forward(params["moe"], normed, config, layout, replayed)
    else:
      out = feed_forward(params["mlp"], normed)
    return (layout.constrain(x + out, "batch", "sequence", None), carry, selection), routed

  first_layer, routed = 0, None
  for name in ("dense_layers", "moe_layers"):
    if name in params:
      count = params[name]["mlp_norm"].shape[0]
      layer_indices = jnp.arange(first_layer, first_layer + count, dtype=jnp.int32)
      replayed = None if routed_experts is None or name == "dense_layers" else jnp.moveaxis(routed_experts, 2, 0)
      step = rematerialize(layer, config.remat, straight=count == 1)
      shallow = count <= UNROLLED_LAYERS and config.remat == "none"
      inputs = (params[name], lora_of(params, name), layer_indices, replayed)
      (x, carry, selection), routed = jax.lax.scan(step, (x, carry, selection), inputs, unroll=shallow)
      first_layer += count
  return rms_norm(x, params["final_norm"], config.rms_norm_eps), carry, routed


def rematerialize(layer: Callable, remat: str, straight: bool = False) -> Callable:
  """`layer` with the remat policy: none keeps all activations, dots keeps matmul results, full keeps inputs only.

  `straight`: it is not the body of a loop, or of one that the compiler dissolves. It would then see that the backward
  pass computes what the forward pass has, and keep that after all, so a barrier is put between them.
  """
  if remat == "none":
    return layer
  policies = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  }
  return jax.checkpoint(layer, policy=policies[remat], prevent_cse=straight)


def head_logits(params: Params, config: ModelConfig, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
  """Logits of the next token, accumulated and returned in fp32; the head is embedᵀ when it is tied."""
  head = params["embed"].T if config.tie_embeddings else params["head"]
  return linear(hidden, head, dtype=jnp.float32)
