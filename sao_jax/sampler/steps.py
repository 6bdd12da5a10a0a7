"""The two programs of the engine: `extend` (prefill and multi-turn continuation) and `decode`. Pure and jitted."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from sao_jax.config import ModelConfig
from sao_jax.models.transformer import head_logits, trunk
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.params import Params
from sao_jax.sampler.cache import read_window, update_slots
from sao_jax.sampler.caches import empty_cache
from sao_jax.sampler.sampling import SamplingRule, sample_tokens, slot_uniforms
from sao_jax.sampler.state import EngineState, SlotState, place_state, state_shardings


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
  _, new, routed = trunk(params, config, token_ids, positions, attend=attend, carry=new, layout=layout)

  update = update.replace(lengths=starts + counts, active=update.active & ~overflow, overflow=overflow)
  shardings = None if layout.mesh is None else state_shardings(state, layout).cache
  cache = update_slots(state.cache, new, slots, starts, counts, fresh=not window, shardings=shardings)
  experts = jnp.moveaxis(routed.experts, 0, 2).astype(jnp.int16) if keep_experts else None
  return place_state(EngineState(cache=cache, slots=_put_rows(state.slots, slots, update)), layout), experts


@functools.partial(
  jax.jit,
  static_argnames=("config", "rule", "window", "max_steps", "keep_experts", "layout"),
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
      unused.
    num_steps: traced, so that the host may choose it freely.
    config: static.
    rule: static.
    window: static, at least the length of every active slot among `slots`.
    max_steps: static.
    keep_experts: static; for models with experts.
    layout: static.
  """
  num_slots, capacity = state.slots.lengths.shape[0], state.cache.num_positions
  everything = slots.shape[0] == num_slots

  # The rows, their past, and a small cache for the tokens of this dispatch.
  first = state.slots if everything else jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode="clip"), state.slots)
  first = first.replace(active=first.active & (slots < num_slots))
  past = read_window(state.cache, None if everything else slots, window)
  new = empty_cache(config, slots.shape[0], max_steps, state.cache.dtype)

  # Random numbers belong to (rollout, index of the token), whatever else is in the batch.
  uniforms = slot_uniforms(key, first.rollout_id, first.random_offset + first.lengths + 1, max_steps)
  shape = (max_steps, slots.shape[0])
  outputs = DecodeOutputs(
    tokens=jnp.zeros(shape, jnp.int32),
    logprobs=jnp.zeros(shape, jnp.float32),
    emitted=jnp.zeros(shape, jnp.bool_),
    overflow=jnp.zeros(shape[1:], jnp.bool_),
    routed_experts=jnp.full((*shape, *config.routed_shape), -1, jnp.int16) if keep_experts else None,
  )

  def unfinished(carry) -> jax.Array:
    step, rows, _, _ = carry
    return (step < num_steps) & jnp.any(rows.active)

  def one_step(carry):
    step, rows, new, outputs = carry

    # Each row feeds its pending token, which this writes to the small cache.
    attend = past.attend(config, first.lengths, step, max_steps)
    hidden, new, routed = trunk(
      params,
      config,
      rows.pending_token[:, None],
      rows.lengths[:, None],
      attend=attend,
      carry=new,
      layout=layout,
    )

    # The next token becomes the pending one, where the row goes on.
    logits = head_logits(params, config, hidden[:, 0], layout)
    tokens, logprobs = sample_tokens(logits, uniforms[step], rows.temperature, rule)
    rows, emitted = _advance(rows, tokens, capacity)

    outputs = outputs.replace(
      tokens=outputs.tokens.at[step].set(tokens),
      logprobs=outputs.logprobs.at[step].set(logprobs),
      emitted=outputs.emitted.at[step].set(emitted),
    )
    if keep_experts:
      experts = jnp.moveaxis(routed.experts[:, :, 0], 0, 1).astype(jnp.int16)
      outputs = outputs.replace(routed_experts=outputs.routed_experts.at[step].set(experts))
    return step + 1, rows, new, outputs

  _, last, new, outputs = jax.lax.while_loop(unfinished, one_step, (jnp.int32(0), first, new, outputs))

  # What was sampled goes to the cache of the slots once per dispatch.
  shardings = None if layout.mesh is None else state_shardings(state, layout).cache
  written, which = last.lengths - first.lengths, None if everything else slots
  cache = update_slots(state.cache, new, which, first.lengths, written, shardings=shardings)
  table = last if everything else _put_rows(state.slots, slots, last)
  return place_state(EngineState(cache=cache, slots=table), layout), outputs.replace(overflow=last.overflow)


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


def _put_rows(table: SlotState, slots: Int[Array, " R"], rows: SlotState) -> SlotState:
  """`table` with the given slots replaced; rows of slots out of range are dropped."""
  return jax.tree.map(lambda full, part: full.at[slots].set(part, mode="drop"), table, rows)
