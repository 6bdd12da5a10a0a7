"""Tokens on their way to the devices of their experts, and what was made of them on the way back.

A token travels once to every device that holds some of its experts, and what it became there is added up at home. Rows
arrive in a bounded buffer; those that it has no room for travel in further rounds, so that any routing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from sao_jax.models.expert_buffer import BUFFER_FACTOR, buffer_rows
from sao_jax.models.experts import count_groups, sort_by_expert
from sao_jax.parallel.ragged_exchange import ragged_exchange

NARROWEST = 8  # columns of a row that travels: for a row of one number, a TPU's compiler takes half a minute


class Group(NamedTuple):
  """The devices among which tokens travel.

  Attributes:
    axes: the mesh axes that split the experts.
    size: the number of devices along them.
    everyone: all mesh axes.
    platform: that of the mesh.
  """

  axes: tuple[str, ...]
  size: int
  everyone: tuple[str, ...]
  platform: str


class Plan(NamedTuple):
  """The rows that a device sends: its tokens, by the device that they go to.

  Attributes:
    tokens: the token of every row.
    places: the row with which a pair travels.
    first: False for a pair that travels with an earlier one of its token, and for one that travels nowhere.
    counts: the number of rows from every device to every device.
  """

  tokens: Int[Array, " L"]
  places: Int[Array, "k N"]
  first: Bool[Array, "k N"]
  counts: Int[Array, "devices devices"]


def dispatch_pays(devices: int, num_active: int) -> bool:
  """Should tokens travel to `devices` that hold the experts, `num_active` of them per token, or all be gathered?

  From here on, a device holds fewer tokens than it would gather, and sends at most two thirds as many. Before, it saves
  nothing: a row that travels through a ring of n chips passes n / 4 links, and a gather passes each link once.
  """
  return devices > BUFFER_FACTOR * num_active


def received_rows(num_tokens: int, num_active: int, devices: int) -> int:
  """The tokens that a device has room for, of `num_tokens` on each: as many as pairs in a buffer; or all of them."""
  all_tokens = devices * num_tokens
  return min(buffer_rows(all_tokens * num_active, devices), all_tokens)


def dispatch(
  compute: Callable[..., tuple[Any, tuple[jax.Array, ...]]],
  carry: Any,
  experts: Int[Array, "N k"],
  arrays: tuple[Float[Array, "N _"], ...],
  *,
  num_experts: int,
  group: Group,
) -> tuple[Any, tuple[Shaped[Array, "N _"], ...]]:
  """Sums of what the devices of a group make of this one's tokens, added up in fp32; inside `jax.shard_map`.

  Args:
    compute: (carry, ids [R, k], *arrays [R, _]) -> (carry, results [R, _]) of tokens from everywhere. Ids count from
      the first expert of this device; others live elsewhere. Rows without a token have none, and zeros.
    carry: passed from round to round.
    experts: the experts of this device's tokens, counted from the first one of all devices.
    arrays: what `compute` is given of them.
    num_experts: the number of experts that a device holds.
    group: the devices.
  """
  me, rows = jax.lax.axis_index(group.axes), received_rows(*experts.shape, group.size)
  plan = make_plan(experts, num_experts, group)
  empty = lambda array, length: jnp.zeros((length, *array.shape[1:]), array.dtype)

  # One round: as many rows as there is room for go out, and come back into the places from where they went.
  def exchange(number: jax.Array, carry: Any, returned: tuple | None) -> tuple[Any, tuple]:
    there, back = slices(plan.counts, me, number, rows)
    ids, *own = (travel(array[plan.tokens], empty(array, rows), there, group) for array in (experts, *arrays))
    used = jnp.arange(rows, dtype=jnp.int32) < jnp.sum(there[3])
    carry, results = compute(carry, jnp.where(used[:, None], ids - me * num_experts, -1), *own)
    returned = tuple(empty(result, len(plan.tokens)) for result in results) if returned is None else returned
    return carry, tuple(travel(result, into, back, group) for result, into in zip(results, returned, strict=True))

  if rows == group.size * experts.shape[0]:
    carry, returned = exchange(jnp.int32(0), carry, None)  # there is room for all
  else:
    # All devices of the mesh take part in every round: programs that communicate must not differ in their steps.
    most = jnp.max(jnp.sum(plan.counts, axis=0))
    rounds = jax.lax.pmax((most + rows - 1) // rows, group.everyone)
    _, shapes = jax.eval_shape(exchange, jnp.int32(0), carry, None)
    start = carry, tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)
    carry, returned = jax.lax.fori_loop(0, rounds, lambda number, state: exchange(number, *state), start)
  return carry, tuple(combine(rows, plan) for rows in returned)


def make_plan(experts: Int[Array, "N k"], num_experts: int, group: Group) -> Plan:
  """Decides which row takes which token where; see `Plan`."""
  num_tokens, num_active = experts.shape
  device = jnp.where((experts >= 0) & (experts < group.size * num_experts), experts // num_experts, group.size)

  # A token goes to a device once, with the first of its experts there.
  earlier = jnp.tril(jnp.ones((num_active, num_active), bool), -1)
  again = jnp.any((device[:, :, None] == device[:, None, :]) & earlier, axis=-1)
  first = ~again & (device < group.size)
  device = jnp.where(first, device, group.size).reshape(-1)

  # Rows in the order of the devices; pairs that do not travel are sorted behind them.
  order, places = sort_by_expert(device, group.size + 1)
  tokens = (order // num_active)[: num_tokens * min(num_active, group.size)]
  counts = jax.lax.all_gather(count_groups(device, group.size), group.axes)
  return Plan(tokens, places.reshape(num_tokens, num_active).T, first.T, counts)


def slices(
  counts: Int[Array, "devices devices"], me: jax.Array, number: jax.Array, rows: int
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
  """The places of the rows of one round, as arguments of `ragged_exchange`: on their way there, and on their way back.

  A device receives `rows` rows in each round: of all that come to it, those of the first device first.
  """
  at_sender = jnp.cumsum(counts, axis=1) - counts
  at_receiver = jnp.cumsum(counts, axis=0) - counts - number * rows

  # Of the rows between two devices, those that this round has room for.
  low, high = jnp.clip(-at_receiver, 0, counts), jnp.clip(rows - at_receiver, 0, counts)
  sizes = high - low
  at_sender, at_receiver = (jnp.where(sizes > 0, place + low, 0) for place in (at_sender, at_receiver))
  there = at_sender[me], sizes[me], at_receiver[me], sizes[:, me]
  back = at_receiver[:, me], sizes[:, me], at_sender[:, me], sizes[me]
  return there, back


def travel(
  array: Shaped[Array, "M _"], into: Shaped[Array, "R _"], places: tuple[jax.Array, ...], group: Group
) -> Shaped[Array, "R _"]:
  """`into`, with the rows of other devices' arrays that `places` names."""
  width = array.shape[1]
  wide = lambda rows: jnp.pad(rows, ((0, 0), (0, max(NARROWEST - width, 0))))
  exchange = ragged_exchange(group.platform)
  return exchange(wide(array), wide(into), *places, axis_name=group.axes)[:, :width]


def combine(rows: Shaped[Array, "L _"], plan: Plan) -> Shaped[Array, "N _"]:
  """The sum of the rows of every token, in fp32."""
  dtype = jnp.float32 if jnp.issubdtype(rows.dtype, jnp.floating) else rows.dtype

  def add_next(number: jax.Array, total: jax.Array) -> jax.Array:
    return total + jnp.where(plan.first[number][:, None], rows[plan.places[number]], 0)

  num_active, num_tokens = plan.places.shape
  zeros = jnp.zeros((num_tokens, rows.shape[1]), dtype)
  return jax.lax.fori_loop(0, num_active, add_next, zeros).astype(rows.dtype)
