"""The loop of decode: a step per token, whatever the layout of the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from sao_jax.config import ModelConfig
from sao_jax.models.attention import Attend
from sao_jax.models.transformer import head_logits, rotary_angles, trunk
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.params import Params
from sao_jax.sampler.sampling import SamplingRule, sample_tokens, slot_uniforms
from sao_jax.sampler.state import SlotState, readable


@flax.struct.dataclass
class DecodeOutputs:
  """The tokens that one dispatch sampled, for the R rows it decoded and at most N steps.

  Attributes:
    tokens: int32 [N, R].
    logprobs: float32 [N, R].
    emitted: bool [N, R]; True where the row really sampled a token. Of a row, a prefix of the steps.
    overflow: bool [R].
    routed_experts: int16 [N, R, L, k], the experts used for the token that each step read: the one before the token
      that it sampled. None: not recorded.
  """

  tokens: Int[Array, "N R"]
  logprobs: Float[Array, "N R"]
  emitted: Bool[Array, "N R"]
  overflow: Bool[Array, " R"]
  routed_experts: Int[Array, "N R L k"] | None


def sample_loop(
  params: Params,
  first: SlotState,
  cache: Any,
  attend_at: Callable[[Int[Array, ""], SlotState], Attend],
  key: Key[Array, ""],
  num_steps: Int[Array, ""],
  *,
  config: ModelConfig,
  rule: SamplingRule,
  max_steps: int,
  capacity: int,
  keep_experts: bool,
  layout: Layout,
  opened: tuple[Float[Array, "R D"], Int[Array, "L R k"] | None] | None = None,
) -> tuple[SlotState, Any, DecodeOutputs]:
  """Samples up to `num_steps` ≤ `max_steps` tokens in every active row; ends early when none is active.

  Args:
    params: the policy.
    first: the R rows before the first step.
    cache: the carry of attention.
    attend_at: (step, rows) -> what the pending tokens read in this step.
    key: the run's key.
    num_steps: traced.
    config: static.
    rule: static.
    max_steps: static.
    capacity: tokens of a context, at most.
    keep_experts: static; for models with experts.
    layout: static.
    opened: hidden states of the rows' pending tokens, where something has read them already, and their experts: of the
      first step, which is then always taken.

  Returns:
    The rows after the last step, the cache, and what was sampled.
  """
  # Random numbers belong to (rollout, index of the token), whatever else is in the batch.
  uniforms = slot_uniforms(key, first.rollout_id, first.random_offset + first.lengths + 1, max_steps)

  # The angles of all steps: inside the loop, a CPU would compute the sines for every layer and head again.
  angles = rotary_angles(config, first.lengths[:, None] + jnp.arange(max_steps, dtype=jnp.int32))  # [R, N, half]
  shape = (max_steps, first.lengths.shape[0])
  outputs = DecodeOutputs(
    tokens=jnp.zeros(shape, jnp.int32),
    logprobs=jnp.zeros(shape, jnp.float32),
    emitted=jnp.zeros(shape, jnp.bool_),
    overflow=jnp.zeros(shape[1:], jnp.bool_),
    routed_experts=jnp.full((*shape, *config.routed_shape), -1, jnp.int16) if keep_experts else None,
  )

  def sample(step: jax.Array, rows: SlotState, hidden: jax.Array, experts: jax.Array | None, outputs: DecodeOutputs):
    # The next token becomes the pending one, where the row goes on.
    logits = spread_rows(head_logits(params, config, hidden, layout), layout)
    tokens, logprobs = sample_tokens(logits, uniforms[step], rows.temperature, rule)
    rows, emitted = _advance(rows, tokens, capacity)

    # What was sampled, and the experts that the token before it was routed to.
    outputs = outputs.replace(
      tokens=outputs.tokens.at[step].set(tokens),
      logprobs=outputs.logprobs.at[step].set(logprobs),
      emitted=outputs.emitted.at[step].set(emitted),
    )
    if keep_experts:
      experts = jnp.moveaxis(experts, 0, 1).astype(jnp.int16)
      outputs = outputs.replace(routed_experts=outputs.routed_experts.at[step].set(experts))
    return rows, outputs

  # The loop ends with its last row: the number of steps need not be known when it is compiled.
  def unfinished(carry) -> jax.Array:
    step, rows, _, _ = carry
    return (step < num_steps) & jnp.any(rows.active)

  def one_step(carry):
    step, rows, cache, outputs = carry

    # Each row feeds its pending token, which this writes to the cache.
    hidden, cache, routed = trunk(
      params,
      config,
      rows.pending_token[:, None],
      rows.lengths[:, None],
      attend=attend_at(step, rows),
      carry=cache,
      layout=layout,
      in_place=True,
      angles=tuple(jax.lax.dynamic_slice_in_dim(part, step, 1, axis=1) for part in angles),
    )
    experts = routed.experts[:, :, 0] if keep_experts else None
    rows, outputs = sample(step, rows, hidden[:, 0], experts, outputs)
    return step + 1, rows, cache, outputs

  step, rows = jnp.int32(0), first
  if opened is not None:
    rows, outputs = sample(step, rows, *opened, outputs)
    step += 1
  _, last, cache, outputs = jax.lax.while_loop(unfinished, one_step, (step, rows, cache, outputs))
  return last, cache, readable(outputs.replace(overflow=last.overflow), layout)


def spread_rows(logits: Float[Array, "R V"], layout: Layout) -> Float[Array, "R V"]:
  """Gives every device whole rows to sample from, where they divide: no device gathers those of all."""
  if not layout.is_sharded or logits.shape[0] % layout.shards("slots", "vocab"):
    return logits
  # First where the head leaves them, or the partitioner would move the head instead.
  logits = layout.constrain(logits, "slots", "vocab")
  axes = layout.rules.mesh_axes("slots") + layout.rules.mesh_axes("vocab")
  return jax.lax.with_sharding_constraint(logits, NamedSharding(layout.mesh, PartitionSpec(axes)))


def _advance(rows: SlotState, tokens: Int[Array, " R"], capacity: int) -> tuple[SlotState, Bool[Array, " R"]]:
  """The rows after one step, and which of them emitted their token.

  A new token's index must stay below the cache's length; a row that would pass it emits nothing and is flagged.
  """
  full = rows.active & (rows.lengths + 1 >= capacity)
  emitted = rows.active & ~full
  stopped = jnp.any(tokens[:, None] == rows.stop_ids, axis=-1)
  count = emitted.astype(jnp.int32)
  budget = rows.budget - count
  rows = rows.replace(
    lengths=rows.lengths + count,
    pending_token=jnp.where(emitted, tokens, rows.pending_token),
    active=emitted & ~stopped & (budget > 0),
    budget=budget,
    overflow=rows.overflow | full,
  )
  return rows, emitted
