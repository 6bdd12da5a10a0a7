"""Dropless mixture of experts: a token's result never depends on the other tokens of the batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.grouped_matmul import grouped_matmul
from sao_jax.parallel.rules import AxisRules


def route(
  x: Float[Array, "N D"], router: Float[Array, "D E"], num_active: int, renormalize: bool
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
  """Weights and ids of the k most probable experts of every token.

  Softmax over all experts in fp32; of equal probabilities the lower expert id wins, in the sampler as in the learner.
  """
  logits = jnp.dot(x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
  weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), num_active)
  if renormalize:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return weights, experts


def expert_feed_forward(
  x: Float[Array, "N D"],
  weights: Float[Array, "N k"],
  experts: Int[Array, "N k"],
  gate: Float[Array, "E D F"],
  up: Float[Array, "E D F"],
  down: Float[Array, "E F D"],
  *,
  implementation: str,
) -> Float[Array, "N D"]:
  """Σ_k weight · down(silu(gate(x)) · up(x)) over the experts that live here, ids 0 ... E - 1; others add nothing.

  The N·k (token, expert) pairs are sorted by expert, so that every expert multiplies one contiguous block of rows.
  """
  num_tokens, num_active = experts.shape
  num_experts = gate.shape[0]
  ids = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts).reshape(-1)
  order = jnp.argsort(ids, stable=True)
  group_sizes = jnp.bincount(ids, length=num_experts + 1)[:num_experts].astype(jnp.int32)
  matmul = functools.partial(grouped_matmul, group_sizes=group_sizes, implementation=implementation)
  rows = x[order // num_active]
  hidden = jax.nn.silu(matmul(rows, gate)) * matmul(rows, up)
  out = matmul(hidden, down)
  back = jnp.argsort(order)
  out = out[back].reshape(num_tokens, num_active, -1)
  return jnp.sum(out * weights[..., None].astype(out.dtype), axis=1)


def moe_feed_forward(
  params: dict[str, Any], x: Float[Array, "B T D"], config: ModelConfig, mesh: Mesh | None, rules: AxisRules
) -> Float[Array, "B T D"]:
  """The routed experts plus, where declared, the shared one.

  On a mesh every device gathers the tokens of its "expert" group, computes the experts it holds (their hidden width
  split over "tensor"), and the partial sums are scattered back: exact and dropless for any routing.
  """
  batch, length, dim = x.shape
  weights, experts = route(
    x.reshape(-1, dim), params["router"], config.num_experts_per_token, config.renormalize_router
  )
  gate, up, down = (params[name].astype(x.dtype) for name in ("gate", "up", "down"))
  compute = functools.partial(expert_feed_forward, implementation=config.moe_implementation)
  out = compute(x.reshape(-1, dim), weights, experts, gate, up, down)
  return out.reshape(batch, length, dim)
