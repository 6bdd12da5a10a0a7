"""The two programs of an engine whose cache lies in pages: as in `steps`, and nothing of the cache is copied."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from sao_jax.config import ModelConfig
from sao_jax.models.transformer import trunk
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.params import Params
from sao_jax.sampler.page_batch import decode_batch, prefill_batch
from sao_jax.sampler.sample_loop import DecodeOutputs, sample_loop
from sao_jax.sampler.sampling import SamplingRule
from sao_jax.sampler.state import EngineState, SlotState, place_state, put_rows


@functools.partial(jax.jit, static_argnames=("config", "capacity", "keep_experts", "layout"), donate_argnames="state")
def extend(
  params: Params,
  state: EngineState,
  table: Int[Array, "D R p"],
  token_ids: Int[Array, "D T"],
  counts: Int[Array, "D R"],
  slots: Int[Array, "D R"],
  update: SlotState,
  *,
  config: ModelConfig,
  capacity: int,
  keep_experts: bool = False,
  layout: Layout,
) -> tuple[EngineState, Int[Array, "D T L k"] | None]:
  """Writes new tokens to the cache, behind what the slots hold. Samples nothing.

  The tokens of a pool's slots lie one behind the other in its row, whatever their numbers and prefixes. With
  `keep_experts` the second result tells which experts were used for the tokens, int16.

  Args:
    params: the policy.
    state: donated.
    table: the pages of each row's slot.
    token_ids: row d holds the tokens of all sequences of pool d; the rest is padding.
    counts: number of tokens of each; sequences without any come last.
    slots: the slot of each; num_slots (out of range) marks an unused one.
    update: D · R rows that replace the slots' fields. Its `lengths` are those *before* the call.
    config: static.
    capacity: static, tokens of a context at most.
    keep_experts: static; for models with experts.
    layout: static.
  """
  starts = update.lengths.reshape(counts.shape)
  overflow = starts + counts > capacity
  page_size = state.cache.page_size

  # Tokens that do not fit, by a fault of the host, are written nowhere; the flag says so.
  batch, positions = prefill_batch(starts, counts, table, token_ids.shape[1], page_size)
  batch = batch.replace(pages=jnp.where(positions < capacity, batch.pages, jnp.iinfo(jnp.int32).max))
  attend = state.cache.attend(config, batch, layout)
  _, cache, routed = trunk(
    params, config, token_ids, positions, attend=attend, carry=state.cache, layout=layout, in_place=True
  )

  # The slots' fields, the last piece of a prompt starts the turn.
  overflow = overflow.reshape(-1)
  update = update.replace(
    lengths=update.lengths + jnp.where(overflow, 0, counts.reshape(-1)),
    active=update.active & ~overflow,
    overflow=overflow,
  )
  table = put_rows(state.slots, slots.reshape(-1), update)
  experts = jnp.moveaxis(routed.experts, 0, 2).astype(jnp.int16) if keep_experts else None
  return place_state(EngineState(cache=cache, slots=table), layout), experts


@functools.partial(
  jax.jit,
  static_argnames=("config", "rule", "max_steps", "capacity", "keep_experts", "layout"),
  donate_argnames="state",
)
def decode(
  params: Params,
  state: EngineState,
  table: Int[Array, "S p"],
  key: Key[Array, ""],
  chosen: Bool[Array, " S"],
  num_steps: Int[Array, ""],
  *,
  config: ModelConfig,
  rule: SamplingRule,
  max_steps: int,
  capacity: int,
  keep_experts: bool = False,
  layout: Layout,
) -> tuple[EngineState, DecodeOutputs]:
  """Samples up to `num_steps` ≤ `max_steps` tokens in every active slot that is chosen; ends early when none is active.

  Args:
    params: the policy.
    state: donated.
    table: the pages of every slot, with room for the tokens of these steps.
    key: the run's key, `jax.random.key(seed)`.
    chosen: the slots to decode; the others stay as they are.
    num_steps: traced, so that the host may choose it freely.
    config: static.
    rule: static.
    max_steps: static.
    capacity: static, tokens of a context at most.
    keep_experts: static; for models with experts.
    layout: static.
  """
  # The table stays as it is during a call: the host has given every slot the pages of all its steps.
  page_size = state.cache.page_size
  first = state.slots.replace(active=state.slots.active & chosen)

  def attend_at(step: jax.Array, rows: SlotState):
    del step
    batch = decode_batch(rows.lengths, rows.active, table, page_size, layout)
    return state.cache.attend(config, batch, layout)

  # The cache itself is the carry of the loop: a token's keys and values go where they stay.
  last, cache, outputs = sample_loop(
    params,
    first,
    state.cache,
    attend_at,
    key,
    num_steps,
    config=config,
    rule=rule,
    max_steps=max_steps,
    capacity=capacity,
    keep_experts=keep_experts,
    layout=layout,
  )

  # Slots that were not chosen may be in the middle of a turn that samples with other weights.
  keep = lambda old, new: jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)
  slots = jax.tree.map(keep, state.slots, last)
  return place_state(EngineState(cache=cache, slots=slots), layout), outputs
