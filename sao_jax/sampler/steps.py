"""The two programs of the engine: `extend` (prefill and multi-turn continuation) and `decode`. Pure and jitted."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from sao_jax.config import ModelConfig
from sao_jax.models.transformer import layers_apart, trunk
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.params import Params
from sao_jax.sampler.cache import read_window, update_slots
from sao_jax.sampler.caches import empty_cache
from sao_jax.sampler.sample_loop import DecodeOutputs, sample_loop
from sao_jax.sampler.sampling import SamplingRule
from sao_jax.sampler.state import EngineState, SlotState, keep_others, place_state, put_rows, readable, state_shardings
from sao_jax.sampler.straight import join_layers, joined_attend, new_positions, runs_straight


@functools.partial(jax.jit, static_argnames=("config", "window", "keep_experts", "layout"), donate_argnames="state")
def extend(
  params: Params,
  state: EngineState,
  token_ids: Int[Array, "P T"],
  counts: Int[Array, " P"],
  slots: Int[Array, " P"],
  update: SlotState,
  *,
  config: ModelConfig,
  window: int,
  keep_experts: bool = False,
  layout: Layout,
) -> tuple[EngineState, Int[Array, "P T L k"] | None]:
  """Writes new tokens to the cache, behind what the slots hold. Samples nothing.

  With `keep_experts` the second result tells which experts were used for the tokens, int16.

  Args:
    params: the policy.
    state: donated.
    token_ids: row p's tokens are the first counts[p]; the rest is padding.
    counts: number of tokens to write of each row.
    slots: the slot of each row; num_slots (out of range) marks an unused row.
    update: P rows that replace the slots' fields. Its `lengths` are those *before* the call: the index of the first
      new token.
    config: static.
    window: static, at least the largest of those lengths (0: all prompts are fresh).
    keep_experts: static; for models with experts.
    layout: static.
  """
  capacity, length = state.cache.num_positions, token_ids.shape[1]
  starts = update.lengths
  overflow = starts + counts > capacity
  counts = jnp.where(overflow, 0, counts)
  positions = starts[:, None] + jnp.arange(length, dtype=jnp.int32)

  # The new tokens go to a small cache of their own, the carry of all layers, and from there to the slots.
  past = read_window(state.cache, slots, window)
  new = empty_cache(config, token_ids.shape[0], length, state.cache.dtype)
  attend = past.attend(config, starts, 0, length)
  _, new, routed = trunk(params, config, token_ids, positions, attend=attend, carry=new, layout=layout, in_place=True)

  update = update.replace(lengths=starts + counts, active=update.active & ~overflow, overflow=overflow)
  shardings = None if layout.mesh is None else state_shardings(state, layout).cache
  cache = update_slots(state.cache, new, slots, starts, counts, fresh=not window, shardings=shardings)
  experts = jnp.moveaxis(routed.experts, 0, 2).astype(jnp.int16) if keep_experts else None
  state = EngineState(cache=cache, slots=put_rows(state.slots, slots, update))
  return place_state(state, layout), readable(experts, layout)


@functools.partial(
  jax.jit,
  static_argnames=("config", "rule", "window", "short", "max_steps", "keep_experts", "layout"),
  donate_argnames="state",
)
def decode(
  params: Params,
  state: EngineState,
  key: Key[Array, ""],
  slots: Int[Array, " R"],
  num_steps: Int[Array, ""],
  *,
  config: ModelConfig,
  rule: SamplingRule,
  window: int,
  short: int = 0,
  max_steps: int,
  keep_experts: bool = False,
  layout: Layout,
) -> tuple[EngineState, DecodeOutputs]:
  """Samples up to `num_steps` ≤ `max_steps` tokens in every active slot among `slots`; ends early when none is active.

  Args:
    params: the policy.
    state: donated.
    key: the run's key, `jax.random.key(seed)`.
    slots: the slot of each row; num_slots (out of range) marks an unused row. With R = num_slots, row r is slot r or
      unused, unless there is a `short` window.
    num_steps: traced, so that the host may choose it freely.
    config: static.
    rule: static.
    window: static, at least the length of every active slot among `slots`.
    short: static, likewise of the first half of the rows; 0: they have the same window. Only where `runs_straight`.
    max_steps: static.
    keep_experts: static; for models with experts.
    layout: static.
  """
  num_slots, capacity = state.slots.lengths.shape[0], state.cache.num_positions
  everything = slots.shape[0] == num_slots and not short

  # The rows, their past, and a small cache for the tokens of this dispatch.
  first = state.slots if everything else jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode="clip"), state.slots)
  first = first.replace(active=first.active & (slots < num_slots))
  straight = runs_straight(config, layout) and "lora" not in params
  if straight:
    # A shallow model on a CPU has every layer in arrays of its own, with room for the new tokens behind the past.
    halves = (
      zip(jnp.split(slots, 2), (short, window), strict=True) if short else [(None if everything else slots, window)]
    )
    parts = [read_window(state.cache, *half) for half in halves]
    params, new = layers_apart(params), join_layers(parts, max_steps)
    attend_at = lambda step, rows: joined_attend(first.lengths, max_steps, step)
  else:
    past = read_window(state.cache, None if everything else slots, window)
    new = empty_cache(config, slots.shape[0], max_steps, state.cache.dtype)
    attend_at = lambda step, rows: past.attend(config, first.lengths, step, max_steps)

  # Each row feeds its pending token, which this writes to the small cache.
  last, new, outputs = sample_loop(
    params,
    first,
    new,
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

  # What was sampled goes to the cache of the slots once per dispatch.
  new = new_positions(new, max_steps) if straight else new
  shardings = None if layout.mesh is None else state_shardings(state, layout).cache
  written, which = last.lengths - first.lengths, None if everything else slots
  cache = update_slots(state.cache, new, which, first.lengths, written, shardings=shardings)

  # Slots that were not chosen may be in the middle of a turn that samples with other weights.
  table = keep_others(state.slots, slots < num_slots, last) if everything else put_rows(state.slots, slots, last)
  return place_state(EngineState(cache=cache, slots=table), layout), outputs
