"""The decoder-only transformer: one parameter layout and one forward pass for training, sampling and the critic."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.attention import Attend, attention_kind
from sao_jax.models.attention.kind import ATTENTION_OUT, PASSED
from sao_jax.models.linear import feed_forward, linear, rms_norm
from sao_jax.models.lora import add_lora, lora_of
from sao_jax.models.moe import Routed, moe_feed_forward, set_experts_apart
from sao_jax.models.passing_layers import scan_passing
from sao_jax.models.rope import rope_table
from sao_jax.models.router import router_bias_paths
from sao_jax.models.vocabulary_shards import can_gather_vocabulary, sharded_embedding
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.params import Params, ParamSpec, Specs, stack_specs

UNROLLED_LAYERS = 4  # without remat a stack this shallow becomes straight code: no copies of stacked activations
Angles = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]  # cos and sin of every token's rotary angles
LAYER_INPUT = "layer_input"  # names what a layer receives, for the policies of `rematerialize`


def param_specs(config: ModelConfig) -> Specs:
  """The declared parameters. Layers are stacked along a leading axis [L, ...]: first the dense ones, then the MoE ones.

  {"embed": [V,D], "dense_layers"?, "moe_layers"?, "final_norm": [D], "head"?: [D,V]}; "head" only if it is not tied.
  A kind of attention may add groups that its layers have in common ("indexer_layers").
  """
  spec = functools.partial(ParamSpec, dtype=config.param_dtype, stddev=config.initializer_range)
  dim = config.d_model
  norm = spec((dim,), (None,), "ones", compute_dtype="float32")
  kind = attention_kind(config)

  def gated(width: int) -> Specs:
    inward, outward = spec((dim, width), ("embed", "mlp")), spec((width, dim), ("mlp", "embed"))
    return {"gate": inward, "up": inward, "down": outward}

  # Every layer has attention; the first ones a dense feed-forward, the others experts.
  layer = {"attention_norm": norm, "attention": kind.specs(config), "mlp_norm": norm}
  num_dense = config.num_mlp_layers
  specs = {"embed": spec((config.vocab_size, dim), ("vocab", "embed")), "final_norm": norm}
  if num_dense:
    specs["dense_layers"] = stack_specs(layer | {"mlp": gated(config.d_ff)}, num_dense)

  if num_dense < config.num_layers:
    experts, width = config.num_experts, config.d_ff_expert
    # Sigmoid routers are kept in fp32, whatever the rest is, as transformers does.
    router = "float32" if config.router == "sigmoid" else config.param_dtype
    moe = {
      "router": spec((dim, experts), ("embed", None), dtype=router, compute_dtype="float32"),
      "gate": spec((experts, dim, width), ("expert", "expert_embed", "mlp")),
      "up": spec((experts, dim, width), ("expert", "expert_embed", "mlp")),
      "down": spec((experts, width, dim), ("expert", "mlp", "expert_embed")),
    }
    if config.router == "sigmoid":
      moe["correction_bias"] = ParamSpec((experts,), (None,), "zeros", "float32", compute_dtype="float32")
    if config.d_ff_shared:
      moe["shared"] = gated(config.d_ff_shared)
    specs["moe_layers"] = stack_specs(layer | {"moe": moe}, config.num_layers - num_dense)

  specs |= kind.common_specs(config)
  if not config.tie_embeddings:
    specs["head"] = spec((dim, config.vocab_size), ("embed", "vocab"))
  return specs


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
  in_place: bool = False,
  added: Float[Array, "B T D"] | None = None,
  angles: Angles | None = None,
) -> tuple[Float[Array, "B T D"], Any, Routed | None]:
  """Embedding, all layers, final norm.

  Args:
    params: the tree that `param_specs(config)` declares ("head" is not read), perhaps with "lora", see `lora`; or what
      `layers_apart` makes of it.
    config: static.
    token_ids: the tokens.
    positions: the rotary position of every token.
    attend: says what a layer's queries read, as the model's kind of attention understands it. Training passes causal
      attention within segments (`AttentionKind.packed`), the sampler one that writes its cache and attends over it.
    carry: state that `attend` threads through the layers, for example the cache.
    routed_experts: the experts to use in the MoE layers, -1 where the router chooses itself (None: everywhere).
    layout: the one that parameters and tokens are placed by.
    in_place: read the experts' weights where they stand in the stack of all layers, without a copy of each layer's: for
      a sampler, whose steps read more weights than tokens. There is then no gradient. Without effect where weights are
      stored in another dtype, split over "expert_embed", or adapted by LoRA.
    added: joins the embeddings of the tokens: what else is known of them. None: nothing.
    angles: `rotary_angles` of the positions, where the caller has them.

  Returns:
    The hidden states after the final norm, in config.dtype; the last carry; and how the MoE layers routed the tokens,
    stacked [L, B, T, ...] over these layers, None without one.
  """
  kind = attention_kind(config)
  table = angles or rotary_angles(config, positions)
  with jax.named_scope("embed"):
    if can_gather_vocabulary(layout) and not in_place:  # a sampler looks up too few tokens to gather the table for
      x = sharded_embedding(layout, config.dtype, params["embed"], token_ids)
    else:
      x = params["embed"][token_ids].astype(config.dtype)
  x = layout.constrain(x if added is None else x + added.astype(config.dtype), "batch", "sequence", None)

  common = {name: params[name] for name in kind.common_specs(config)}
  passed = kind.start(config, attend, *token_ids.shape)
  if passed is not None:
    common = jax.lax.stop_gradient(common)  # a choice is passed, which has no gradient
  scale = params["lora"]["scale"] if "lora" in params else None

  # Experts that the layers read where they stand, {} if each layer is given its own.
  stacks, experts = {name: params[name] for name in ("dense_layers", "moe_layers") if name in params}, {}
  apart = any(isinstance(stack, tuple) for stack in stacks.values())
  if in_place and scale is None and "moe_layers" in stacks and not apart:
    stacks["moe_layers"], experts = set_experts_apart(stacks["moe_layers"], x.dtype, layout)

  def layer(
    state: tuple[jax.Array, Any, Any],
    inputs: tuple[Params, Params, jax.Array, jax.Array | None],
    chosen: bool = False,
  ) -> tuple[tuple[jax.Array, Any, Any], Routed | None]:
    x, carry, passed = state
    params, lora, layer_index, replayed = inputs
    params, routed = add_lora(params, lora, scale), None
    x = checkpoint_name(x, LAYER_INPUT)

    # x + attention(norm(x))
    normed = rms_norm(x, params["attention_norm"], config.rms_norm_eps)
    out, carry, passed = kind.layer(
      params["attention"],
      normed,
      table,
      config,
      attend,
      layer_index,
      carry,
      common=common,
      passed=passed,
      chosen=chosen,
      layout=layout,
    )
    x = x + out

    # x + feed_forward(norm(x)), dense or of the experts
    normed = rms_norm(x, params["mlp_norm"], config.rms_norm_eps)
    if "moe" in params:
      place = layer_index - config.num_mlp_layers if experts else None
      out, routed = moe_feed_forward(params["moe"] | experts, normed, config, layout, replayed, place, batched=apart)
    else:
      out = feed_forward(params["mlp"], normed, layout)
    return (layout.constrain(x + out, "batch", "sequence", None), carry, passed), routed

  # With `scan_passing`: without a carry.
  def passing_layer(x: jax.Array, passed: Any, weights: Any, others: Any, chosen: bool) -> tuple[jax.Array, Any, Any]:
    (x, _, passed), routed = layer((x, None, passed), (*weights, *others), chosen)
    return x, passed, routed

  # One loop over each stack of equal layers, or straight code.
  first_layer, routed = 0, None
  for name, stack in stacks.items():
    if apart:
      of_layers = []
      for index, weights in enumerate(stack, first_layer):
        (x, carry, passed), of_layer = layer((x, carry, passed), (weights, lora_of(params, name), index, None))
        of_layers.append(of_layer)
      routed = jax.tree.map(lambda *parts: jnp.stack(parts), *of_layers)
      first_layer += len(stack)
      continue

    count = stack["mlp_norm"].shape[0]
    layer_indices = jnp.arange(first_layer, first_layer + count, dtype=jnp.int32)
    replayed = None if routed_experts is None or name == "dense_layers" else jnp.moveaxis(routed_experts, 2, 0)
    inputs = (stack, lora_of(params, name), layer_indices, replayed)
    if passed is not None and config.remat == "full" and carry is None:
      replaces = kind.replaces(config)[first_layer : first_layer + count]
      x, passed, routed = scan_passing(passing_layer, replaces, x, passed, inputs[:2], inputs[2:])
    else:
      step = rematerialize(layer, config.remat, straight=count == 1)
      shallow = count <= UNROLLED_LAYERS and config.remat == "none"
      (x, carry, passed), routed = jax.lax.scan(step, (x, carry, passed), inputs, unroll=shallow)
    first_layer += count

  return rms_norm(x, params["final_norm"], config.rms_norm_eps), carry, routed


def layers_apart(params: Params) -> Params:
  """`params` with a tuple of layers in place of each stack: for a program without gradient that loops over `trunk`.

  XLA copies a layer out of its stack on a CPU, in every turn of the loop; here that is done once, before it. The layers
  become straight code, and all experts of a layer are computed at once (`batched_experts`).
  """

  def cut(stack: Params) -> tuple[Params, ...]:
    layers = range(stack["mlp_norm"].shape[0])
    return tuple(jax.tree.map(operator.itemgetter(layer), stack) for layer in layers)

  return params | {name: cut(params[name]) for name in ("dense_layers", "moe_layers") if name in params}


def rotary_angles(config: ModelConfig, positions: Int[Array, "B T"]) -> Angles:
  """The `rope_table` of a model."""
  return rope_table(positions, attention_kind(config).rotary_dim(config), config.rope_theta, config.yarn)


def fixed_paths(config: ModelConfig) -> frozenset[str]:
  """The full names of the leaves that no gradient reaches: parts of attention, and the correction biases of routers."""
  return attention_kind(config).fixed(config) | router_bias_paths(config)


def rematerialize(layer: Callable, remat: str, straight: bool = False) -> Callable:
  """`layer` with a policy of what the backward pass finds and what it computes again.

  none: finds everything. dots: results of matrix products, and of attention. attention: results of attention and the
  layer's input. full: the input only. offload: as attention, but in the host's memory. All but full find what a layer
  passes on, in place of what it was passed; for full see `passing_layers`.

  Set `straight` when `layer` is not inside a loop after compilation. XLA could then merge the recomputation with the
  forward pass and keep the activations; `prevent_cse` stops it.
  """
  if remat == "none":
    return layer

  # By name where the values have one: `checkpoint_name`.
  keep = jax.checkpoint_policies
  attention = keep.save_only_these_names(ATTENTION_OUT, PASSED)
  policies = {
    "full": keep.nothing_saveable,
    "dots": keep.save_from_both_policies(keep.dots_with_no_batch_dims_saveable, attention),
    "attention": attention,
    "offload": keep.save_and_offload_only_these_names(
      names_which_can_be_saved=[PASSED],
      names_which_can_be_offloaded=[ATTENTION_OUT, LAYER_INPUT],
      offload_src="device",
      offload_dst="pinned_host",
    ),
  }
  return jax.checkpoint(layer, policy=policies[remat], prevent_cse=straight)


@jax.named_scope("head")
def head_logits(
  params: Params, config: ModelConfig, hidden: Float[Array, "*batch D"], layout: Layout = ONE_DEVICE
) -> Float[Array, "*batch V"]:
  """Logits of the next token, accumulated and returned in fp32."""
  return linear(hidden, output_head(params, config), layout, dtype=jnp.float32)


def output_head(params: Params, config: ModelConfig) -> Float[Array, "D V"]:
  """The matrix from hidden states to logits: embedᵀ when it is tied."""
  return params["embed"].T if config.tie_embeddings else params["head"]
