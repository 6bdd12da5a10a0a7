"""The engine's state on the device, described and shaped."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.config import ModelConfig, SamplerConfig
from sao_jax.parallel.layout import Layout
from sao_jax.sampler.cache import Cache
from sao_jax.sampler.caches import empty_cache

# Stop ids per slot; unused places hold -1, which no token equals.
MAX_STOP_IDS = 8


@flax.struct.dataclass
class SlotState:
  """One entry per slot.

  The last token of a slot is always *pending*: it is not in the cache yet. Decode feeds it, so that all
  sampling happens in decode, after a prompt as after a sampled token.

  Attributes:
    lengths: int32, number of tokens that are in the cache; the pending token has this index in the trajectory.
    pending_token: int32, the last token, prompt or sampled.
    rollout_id: int32, with the run seed and a token's index it determines the token's random numbers.
    random_offset: int32, added to that index: tokens of the trajectory's earlier contexts.
    active: bool, True while a turn is decoded.
    budget: int32, tokens that the turn may still sample.
    stop_ids: int32, tokens that end the turn (they are sampled and kept); -1 where unused.
    temperature: float32.
    overflow: bool, decode was asked to go past the cache: the slot stopped. The host never lets it come to this.
  """

  lengths: Int[Array, " S"]
  pending_token: Int[Array, " S"]
  rollout_id: Int[Array, " S"]
  random_offset: Int[Array, " S"]
  active: Bool[Array, " S"]
  budget: Int[Array, " S"]
  stop_ids: Int[Array, "S n"]
  temperature: Float[Array, " S"]
  overflow: Bool[Array, " S"]


@flax.struct.dataclass
class EngineState:
  """The whole device state, donated to every call."""

  cache: Cache
  slots: SlotState


def empty_slots(num_slots: int) -> SlotState:
  """Idle slots that hold nothing."""
  zeros = lambda dtype: jnp.zeros((num_slots,), dtype)
  return SlotState(
    lengths=zeros(jnp.int32),
    pending_token=zeros(jnp.int32),
    rollout_id=zeros(jnp.int32),
    random_offset=zeros(jnp.int32),
    active=zeros(jnp.bool_),
    budget=zeros(jnp.int32),
    stop_ids=jnp.full((num_slots, MAX_STOP_IDS), -1, jnp.int32),
    temperature=jnp.ones((num_slots,), jnp.float32),
    overflow=zeros(jnp.bool_),
  )


def state_shardings(state: EngineState, layout: Layout) -> EngineState:
  """Slots over the data axes, the heads of a cache that has any over "tensor" (`Cache.LOGICAL_AXES`)."""
  place = lambda tree, *logical: jax.tree.map(lambda _: layout.sharding(*logical), tree)
  return EngineState(cache=place(state.cache, *state.cache.LOGICAL_AXES), slots=place(state.slots, "slots"))


def place_state(state: EngineState, layout: Layout) -> EngineState:
  """Tells the partitioner where the state lives, so that no program changes its layout."""
  return state if layout.mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(state, layout))


def empty_state(model: ModelConfig, sampler: SamplerConfig, layout: Layout) -> EngineState:
  """The state of an engine that holds nothing."""

  def build() -> EngineState:
    cache = empty_cache(model, sampler.num_slots, sampler.context_length, sampler.cache_dtype)
    return EngineState(cache=cache, slots=empty_slots(sampler.num_slots))

  if layout.mesh is None:
    return build()
  return jax.jit(build, out_shardings=state_shardings(jax.eval_shape(build), layout))()
