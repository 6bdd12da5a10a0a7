"""The program of an engine whose cache lies in pages: a step that reads prompts as well, then steps of decode.

It is compiled twice, with a chunk of prompts and without one, and copies nothing of the cache.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key, Shaped

from sao_jax.config import ModelConfig
from sao_jax.models.transformer import trunk
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.params import Params
from sao_jax.sampler.page_batch import NOWHERE, FlatTokens, decode_batch, mixed_batch
from sao_jax.sampler.sample_loop import DecodeOutputs, sample_loop
from sao_jax.sampler.sampling import SamplingRule
from sao_jax.sampler.state import EngineState, SlotState, keep_others, place_state, readable


@flax.struct.dataclass
class Prompts:
  """Tokens of prompts for some of S slots, at most T for those of each of D pools.

  Attributes:
    token_ids: int32, those of a pool in the order of its slots, one behind the other; the rest is padding.
    counts: int32, how many every slot gets.
    given: bool, the slots whose fields are replaced: all that get tokens, and those that start without any.
    fields: what replaces them. `lengths` are those *before* the call; `active` where a prompt ends.
  """

  token_ids: Int[Array, "D T"]
  counts: Int[Array, " S"]
  given: Bool[Array, " S"]
  fields: SlotState


@functools.partial(
  jax.jit,
  static_argnames=("config", "rule", "max_steps", "capacity", "keep_experts", "layout"),
  donate_argnames="state",
)
def dispatch(
  params: Params,
  state: EngineState,
  table: Int[Array, "S p"],
  key: Key[Array, ""],
  chosen: Bool[Array, " S"],
  num_steps: Int[Array, ""],
  prompts: Prompts | None = None,
  *,
  config: ModelConfig,
  rule: SamplingRule,
  max_steps: int,
  capacity: int,
  keep_experts: bool = False,
  layout: Layout,
) -> tuple[EngineState, DecodeOutputs, Int[Array, "D N L k"] | None]:
  """Samples up to `num_steps` ≤ `max_steps` tokens in every active slot that is chosen; ends early when none is active.

  With prompts, the first step also writes their tokens, in one pass with the pending tokens of all slots: a slot whose
  prompt ends samples in that step already. The last result tells which experts the tokens of that step used, int16.

  Args:
    params: the policy.
    state: donated.
    table: the pages of every slot, with room for the tokens of these steps.
    key: the run's key, `jax.random.key(seed)`.
    chosen: the slots to decode, and those with prompts; the others stay as they are.
    num_steps: traced, so that the host may choose it freely; at least 1 with prompts.
    prompts: None: no slot gets any, which is another program.
    config: static.
    rule: static.
    max_steps: static.
    capacity: static, tokens of a context at most.
    keep_experts: static; for models with experts.
    layout: static.
  """
  page_size = state.cache.page_size
  first, cache, opened, experts = state.slots, state.cache, None, None

  if prompts is not None:
    starts = jnp.where(prompts.given, prompts.fields.lengths, first.lengths)
    first = _begin(first, prompts, capacity)
    first = first.replace(active=first.active & chosen)

    # One pass through the model, over all tokens of a pool in a row.
    num_tokens = prompts.token_ids.shape[1] + first.lengths.shape[0] // layout.shards("slots")
    batch, tokens = mixed_batch(starts, prompts.counts, first.active, table, num_tokens, page_size, layout)
    # Tokens that do not fit, by a fault of the host, are written nowhere; the slot's flag says so.
    batch = batch.replace(pages=jnp.where(tokens.positions < capacity, batch.pages, NOWHERE))
    token_ids = _token_ids(first.pending_token, prompts, tokens)
    attend = cache.attend(config, batch, layout)
    hidden, cache, routed = trunk(
      params, config, token_ids, tokens.positions, attend=attend, carry=cache, layout=layout, in_place=True
    )

    # What the pending tokens are followed by is sampled, as in any other step.
    hidden = _of_slots(hidden, tokens)
    of_pending = None
    if keep_experts:
      of_pending = jax.vmap(lambda of_layer: _of_slots(of_layer, tokens))(routed.experts)
      experts = jnp.moveaxis(routed.experts, 0, 2).astype(jnp.int16)
    opened = hidden, of_pending

  # The table stays as it is during a call: the host has given every slot the pages of all its steps.
  def attend_at(step: jax.Array, rows: SlotState):
    del step
    batch = decode_batch(rows.lengths, rows.active, table, page_size, layout)
    return cache.attend(config, batch, layout)

  # The cache itself is the carry of the loop: a token's keys and values go where they stay.
  last, cache, outputs = sample_loop(
    params,
    first.replace(active=first.active & chosen),
    cache,
    attend_at,
    key,
    num_steps,
    config=config,
    rule=rule,
    max_steps=max_steps,
    capacity=capacity,
    keep_experts=keep_experts,
    layout=layout,
    opened=opened,
  )

  # Slots that were not chosen may be in the middle of a turn that samples with other weights.
  slots = keep_others(state.slots, chosen, last)
  return place_state(EngineState(cache=cache, slots=slots), layout), outputs, readable(experts, layout)


def _begin(slots: SlotState, prompts: Prompts, capacity: int) -> SlotState:
  """The slots after the prompts' tokens are written. One that would overflow stops, and is flagged."""
  overflow = prompts.fields.lengths + prompts.counts > capacity
  fields = prompts.fields.replace(
    lengths=prompts.fields.lengths + jnp.where(overflow, 0, prompts.counts),
    active=prompts.fields.active & ~overflow,
    overflow=overflow,
  )
  return keep_others(slots, prompts.given, fields)


def _token_ids(pending: Int[Array, " S"], prompts: Prompts, tokens: FlatTokens) -> Int[Array, "D N"]:
  """The tokens of a pool's slots, one behind the other: of each those of its prompt, then the pending one."""
  take = lambda values: jnp.take_along_axis(values, tokens.rows, axis=1)
  counts = prompts.counts.reshape(tokens.last.shape)
  place = take(jnp.cumsum(counts, axis=1) - counts) + tokens.index
  place = jnp.clip(place, 0, prompts.token_ids.shape[1] - 1)
  of_prompt = jnp.take_along_axis(prompts.token_ids, place, axis=1)
  return jnp.where(tokens.index < take(counts), of_prompt, take(pending.reshape(counts.shape)))


def _of_slots(values: Shaped[Array, "D N n"], tokens: FlatTokens) -> Shaped[Array, "S n"]:
  """Of the values of all tokens those of every slot's last one."""
  taken = jnp.take_along_axis(values, tokens.last[..., None], axis=1)
  return taken.reshape(-1, values.shape[-1])
