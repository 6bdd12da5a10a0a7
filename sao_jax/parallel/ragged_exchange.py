"""Rows that go to other devices, a different number to each: a collective of a TPU, and plain jax elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def ragged_exchange(platform: str) -> Callable[..., jax.Array]:
  """The implementation of `exchange_rows` for a platform."""
  return jax.lax.ragged_all_to_all if platform == "tpu" else exchange_rows


def exchange_rows(
  operand: Shaped[Array, "L *row"],
  output: Shaped[Array, "R *row"],
  input_offsets: Int[Array, " devices"],
  send_sizes: Int[Array, " devices"],
  output_offsets: Int[Array, " devices"],
  recv_sizes: Int[Array, " devices"],
  *,
  axis_name: str | tuple[str, ...],
) -> Shaped[Array, "R *row"]:
  """`output`, with the rows that the devices along `axis_name` send to this one; inside `jax.shard_map`.

  The signature and its meaning are those of `jax.lax.ragged_all_to_all`, which CPUs do not have, with one slice per
  device. Every device gathers all rows and takes its own, so this is for few of them.

  Args:
    operand: the rows that this device may send.
    output: what stands where nothing is received.
    input_offsets: the first row for every device.
    send_sizes: the number of rows for every device.
    output_offsets: the place of the first of them there.
    recv_sizes: the number of rows from every device.
    axis_name: the mesh axes.
  """
  del send_sizes  # the receivers know them
  rows = jax.lax.all_gather(operand, axis_name)
  to_here = lambda places: jax.lax.all_to_all(places, axis_name, 0, 0, tiled=True)
  first, start = to_here(input_offsets), to_here(output_offsets)

  # Every place is in the slice of one sender, or of none.
  place = jnp.arange(output.shape[0], dtype=jnp.int32)[:, None]
  inside = (place >= start) & (place < start + recv_sizes)
  sender = jnp.argmax(inside, axis=1)
  received = rows[sender, jnp.clip(first[sender] + place[:, 0] - start[sender], 0, operand.shape[0] - 1)]
  any_sender = jnp.any(inside, axis=1).reshape(-1, *[1] * (output.ndim - 1))
  return jnp.where(any_sender, received, output)
