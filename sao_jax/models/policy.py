"""The policy as the train step sees it: packed rows to token log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.attention import attention_kind
from sao_jax.models.logprobs import token_logprobs
from sao_jax.models.moe import Routed
from sao_jax.models.transformer import trunk
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.params import Params
from sao_jax.types import PolicyOutputs, RouterStatistics, TrajectoryBatch


def packed_trunk(
  params: Params,
  config: ModelConfig,
  batch: TrajectoryBatch,
  layout: Layout,
  routed_experts: Int[Array, "B T L k"] | None = None,
  added: Float[Array, "B T D"] | None = None,
) -> tuple[jax.Array, Routed | None]:
  """Hidden states [B, T, D] of packed rows, whose segments do not read each other, and how they were routed.

  `added` joins the embeddings, as in `trunk`.
  """
  hidden, _, routed = trunk(
    params,
    config,
    batch.token_ids,
    batch.positions,
    attend=attention_kind(config).packed(config, batch.segment_ids, layout),
    routed_experts=routed_experts,
    layout=layout,
    added=added,
  )
  return hidden, routed


def make_policy_apply(
  config: ModelConfig,
  *,
  temperature: float = 1.0,
  chunk: int = 1024,
  layout: Layout = ONE_DEVICE,
) -> Callable[[Params, TrajectoryBatch], PolicyOutputs]:
  """Returns `policy_apply(params, batch) -> PolicyOutputs`, token-aligned and fp32.

  Experts that the batch brings along (`batch.routed_experts`) are used instead of those that the routers prefer.

  Args:
    config: static.
    temperature: the sampler's: logits are divided by it.
    chunk: tokens whose logits are in memory at a time, see `token_logprobs`.
    layout: the one that parameters and batch are placed by.
  """
  head = functools.partial(token_logprobs, temperature=temperature, chunk=chunk, layout=layout)

  def policy_apply(params: Params, batch: TrajectoryBatch) -> PolicyOutputs:
    hidden, routed = packed_trunk(params, config, batch, layout, batch.routed_experts)
    logprobs, entropy = head(params, config, hidden, batch.token_ids, batch.segment_ids)

    # A caller that does not read the statistics does not pay for them: the compiler drops what is unused.
    router = None if routed is None else count_routed(routed, batch, config.num_experts)
    return PolicyOutputs(logprobs, entropy, router)

  return policy_apply


def count_routed(routed: Routed, batch: TrajectoryBatch, num_experts: int) -> RouterStatistics:
  """Counts what the routers did with the tokens of every row. Padding is left out, except in `dropped`."""
  real = (batch.segment_ids > 0)[None]  # [1, B, T]
  count = lambda numbers: jnp.sum(jnp.where(real, numbers, 0), axis=2, dtype=jnp.float32).T  # [B, L]

  # One-hot over the experts, summed over the tokens of a row and their k choices; one layer at a time.
  num_active = routed.experts.shape[-1]

  def layer_load(experts: jax.Array) -> jax.Array:  # [B, T, k] -> [B, E]
    chosen = experts[..., None] == jnp.arange(num_experts, dtype=experts.dtype)
    return jnp.sum(chosen & real[0, ..., None, None], axis=(1, 2), dtype=jnp.float32)

  load = jax.lax.map(layer_load, routed.experts)

  # A token replays all its experts of a layer, or none: -1 marks the latter.
  replayed = jnp.zeros(routed.entropy.shape, jnp.bool_)
  if batch.routed_experts is not None:
    replayed = jnp.moveaxis(batch.routed_experts[..., 0] >= 0, 2, 0)

  return RouterStatistics(
    tokens=jnp.sum(real[0], axis=1, dtype=jnp.float32),
    load=jnp.moveaxis(load, 0, 1),
    entropy=count(routed.entropy),
    replayed=num_active * count(replayed),
    agreeing=count(jnp.where(replayed, routed.agreeing, 0)),
    dropped=jnp.sum(num_active - routed.computed, axis=2, dtype=jnp.float32).T,
  )
