"""The engine's state on the device, described and shaped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sao_jax.parallel.layout import Layout

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
  """The whole device state, donated to every call: a `Cache` or a `PagedCache`, and the slots."""

  cache: Any
  slots: SlotState


def idle_rows(count: int) -> SlotState:
  """Idle slots that hold nothing, on the host."""
  zeros = lambda dtype: np.zeros((count,), dtype)
  return SlotState(
    lengths=zeros(np.int32),
    pending_token=zeros(np.int32),
    rollout_id=zeros(np.int32),
    random_offset=zeros(np.int32),
    active=zeros(np.bool_),
    budget=zeros(np.int32),
    stop_ids=np.full((count, MAX_STOP_IDS), -1, np.int32),
    temperature=np.ones((count,), np.float32),
    overflow=zeros(np.bool_),
  )


def empty_slots(num_slots: int) -> SlotState:
  """Idle slots that hold nothing."""
  return jax.tree.map(jnp.asarray, idle_rows(num_slots))


def put_rows(table: SlotState, slots: Int[Array, " R"], rows: SlotState) -> SlotState:
  """`table` with the given slots replaced; rows of slots out of range are dropped."""
  return jax.tree.map(lambda full, part: full.at[slots].set(part, mode="drop"), table, rows)


def keep_others(table: SlotState, chosen: Bool[Array, " S"], rows: SlotState) -> SlotState:
  """`table` with those of all its slots replaced that are chosen."""
  choose = lambda old, new: jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)
  return jax.tree.map(choose, table, rows)


def state_shardings(state: EngineState, layout: Layout) -> EngineState:
  """Slots over the data axes, the heads of a cache that has any over "tensor" (`Cache.LOGICAL_AXES`)."""
  place = lambda tree, *logical: jax.tree.map(lambda _: layout.sharding(*logical), tree)
  return EngineState(cache=place(state.cache, *state.cache.LOGICAL_AXES), slots=place(state.slots, "slots"))


def place_state(state: EngineState, layout: Layout) -> EngineState:
  """Tells the partitioner where the state lives, so that no program changes its layout."""
  return state if layout.mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(state, layout))


def readable(outputs: Any, layout: Layout) -> Any:
  """Tells the partitioner that hosts read what a call returns: where none has all devices, each gets all of it."""
  return jax.lax.with_sharding_constraint(outputs, layout.sharding()) if layout.spans_processes else outputs


def empty_state(build_cache: Callable[[], Any], num_slots: int, layout: Layout) -> EngineState:
  """The state of an engine that holds nothing."""

  def build() -> EngineState:
    return EngineState(cache=build_cache(), slots=empty_slots(num_slots))

  if layout.mesh is None:
    return build()
  return jax.jit(build, out_shardings=state_shardings(jax.eval_shape(build), layout))()
