"""Routers of mixture-of-experts layers: the experts of a token, their weights, and biases that even out the load."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.linear import linear
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.params import Params


class Routing(NamedTuple):
  """The decisions of a router about every token.

  Attributes:
    weights: the weights of the k experts used, fp32.
    experts: their ids.
    entropy: the entropy of the router's distribution over all experts (scores divided by their sum), in nats, without
      gradient.
    agreeing: how many of the k experts used are among the k that the router prefers: all, unless they are replayed.
  """

  weights: Float[Array, "*batch k"]
  experts: Int[Array, "*batch k"]
  entropy: Float[Array, "*batch"]
  agreeing: Int[Array, "*batch"]


@jax.named_scope("router")
def route(
  params: dict[str, Any],
  x: Float[Array, "*batch D"],
  config: ModelConfig,
  replayed: Int[Array, "*batch k"] | None = None,
  layout: Layout = ONE_DEVICE,
) -> Routing:
  """Chooses k experts for every token; of equal ones the lower id wins, in the sampler as in the learner. All in fp32.

  * "softmax": the most probable experts, weighted by their probability.
  * "sigmoid" (DeepSeek-V3 and GLM; arXiv 2412.19437, section 2.1.2): those with the largest sigmoid(x · router) + bias,
    within the `num_groups_per_token` groups whose two best experts have the largest sum. The weight is the score
    without the bias, which therefore has no gradient.

  Weights are divided by their sum (`renormalize_router`) and multiplied by `routed_scaling`.

  Args:
    params: "router" [D, E]; for "sigmoid" also "correction_bias" [E].
    x: hidden states.
    config: static.
    replayed: experts to use instead (rollout routing replay, arXiv 2510.11370), -1 where the router chooses itself.
      Their weights are this router's, and so are the gradients.
    layout: the one that the tokens are placed by.
  """
  logits = linear(x.astype(jnp.float32), params["router"], layout, precision=jax.lax.Precision.HIGHEST)

  # What experts are chosen by, and what they are weighted by.
  if config.router == "sigmoid":
    scores, log_scores = jax.nn.sigmoid(logits), jax.nn.log_sigmoid(logits)
    choice = scores + params["correction_bias"].astype(jnp.float32)
    if config.num_expert_groups > 1:
      choice = _keep_best_groups(choice, config.num_expert_groups, config.num_groups_per_token)
  else:
    scores = choice = jax.nn.softmax(logits, axis=-1)
    log_scores = jax.nn.log_softmax(logits, axis=-1)

  highest, preferred = jax.lax.top_k(choice, config.num_experts_per_token)
  if replayed is None and config.router == "softmax":  # the same numbers as below, without a gather
    experts = preferred
    weights = highest / jnp.sum(highest, axis=-1, keepdims=True) if config.renormalize_router else highest
  else:
    experts = preferred if replayed is None else jnp.where(replayed >= 0, replayed.astype(preferred.dtype), preferred)
    # In log space: the scores of replayed experts may all be too small to be divided by their sum.
    log_weights = _of_experts(log_scores, experts)
    weights = jax.nn.softmax(log_weights, axis=-1) if config.renormalize_router else jnp.exp(log_weights)

  agreeing = jnp.any(experts[..., :, None] == preferred[..., None, :], axis=-1)
  return Routing(
    weights=weights * config.routed_scaling,
    experts=experts,
    entropy=_entropy(jax.lax.stop_gradient(scores)),
    agreeing=jnp.sum(agreeing, axis=-1, dtype=jnp.int32),
  )


def _entropy(scores: Float[Array, "*batch E"]) -> Float[Array, "*batch"]:
  probabilities = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
  return jnp.sum(jax.scipy.special.entr(probabilities), axis=-1)


def _of_experts(scores: Float[Array, "*batch E"], experts: Int[Array, "*batch k"]) -> Float[Array, "*batch k"]:
  """The scores of some experts, NaN for one that there is not.

  As a sum, whose gradient is a sum, too: that of a gather would be scattered, which takes a TPU a sort.
  """
  is_chosen = experts[..., None] == jnp.arange(scores.shape[-1], dtype=experts.dtype)
  found = jnp.sum(jnp.where(is_chosen, scores[..., None, :], 0), axis=-1)
  return jnp.where(jnp.any(is_chosen, axis=-1), found, jnp.nan)


def _keep_best_groups(choice: Float[Array, "*batch E"], num_groups: int, num_kept: int) -> Float[Array, "*batch E"]:
  """-inf for the experts of all but the best groups."""
  grouped = choice.reshape(*choice.shape[:-1], num_groups, -1)
  group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
  _, kept = jax.lax.top_k(group_scores, num_kept)
  is_kept = jnp.any(kept[..., None] == jnp.arange(num_groups, dtype=kept.dtype), axis=-2)
  return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(choice.shape)


def router_bias_paths(config: ModelConfig) -> frozenset[str]:
  """The full names of the correction biases, of which there may be none."""
  has_bias = config.router == "sigmoid" and config.num_moe_layers > 0
  return frozenset({"moe_layers/moe/correction_bias"}) if has_bias else frozenset()


def update_router_bias(params: Params, load: Float[Array, "L E"], rate: float) -> Params:
  """The parameters with every bias changed by rate · sign(even share - load of its expert)."""
  layers = params["moe_layers"]
  even = jnp.mean(load, axis=-1, keepdims=True)
  bias = layers["moe"]["correction_bias"]
  changed = bias + (rate * jnp.sign(even - load)).astype(bias.dtype)
  return params | {"moe_layers": layers | {"moe": layers["moe"] | {"correction_bias": changed}}}
