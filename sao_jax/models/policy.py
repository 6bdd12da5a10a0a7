"""The policy as the train step sees it: packed rows to token log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from sao_jax.config import ModelConfig
from sao_jax.models.attention import packed_attend
from sao_jax.models.latent_layer import packed_latent_attend
from sao_jax.models.logprobs import token_logprobs
from sao_jax.models.transformer import Attend, trunk
from sao_jax.parallel.params import Params
from sao_jax.parallel.rules import DEFAULT_RULES, AxisRules
from sao_jax.types import TrajectoryBatch


def attend_within_segments(
  config: ModelConfig, segment_ids: Int[Array, "B T"], mesh: Mesh | None = None, rules: AxisRules = DEFAULT_RULES
) -> Attend:
  """The `attend` argument of `trunk` for packed rows, for this model's kind of attention."""
  if config.kv_lora_rank:
    return packed_latent_attend(segment_ids, config, mesh, rules)
  return packed_attend(segment_ids, mesh, rules)


def packed_trunk(
  params: Params, config: ModelConfig, batch: TrajectoryBatch, mesh: Mesh | None, rules: AxisRules
) -> jax.Array:
  """Hidden states [B, T, D] of packed rows; no segment reads another."""
  attend = attend_within_segments(config, batch.segment_ids, mesh, rules)
  return trunk(params, config, batch.token_ids, batch.positions, attend=attend, mesh=mesh, rules=rules)[0]


def make_policy_apply(
  config: ModelConfig,
  *,
  temperature: float = 1.0,
  chunk: int = 1024,
  mesh: Mesh | None = None,
  rules: AxisRules = DEFAULT_RULES,
) -> Callable[[Params, TrajectoryBatch], tuple[jax.Array, jax.Array]]:
  """Returns `policy_apply(params, batch) -> (logprobs [B, T], entropy [B, T])`, token-aligned and fp32.

  `temperature` must be the sampler's; see `token_logprobs` for `chunk` and for where the entries are 0.
  """
  head = functools.partial(token_logprobs, temperature=temperature, chunk=chunk, mesh=mesh, rules=rules)

  def policy_apply(params: Params, batch: TrajectoryBatch) -> tuple[jax.Array, jax.Array]:
    hidden = packed_trunk(params, config, batch, mesh, rules)
    return head(params, config, hidden, batch.token_ids, batch.segment_ids)

  return policy_apply
