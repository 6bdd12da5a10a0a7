"""Latents as a TPU's kernels hold them in VMEM: words of 32 bits, of which single rows can be loaded.

bf16 numbers lie there in pairs of rows, and a row alone cannot be addressed. So two numbers of a latent share a word.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LANES, SUBLANES = 128, 8
ROOM_BYTES = 62 * 2**20  # of VMEM for a range and the queries beside it, of the 64 MiB of a core of a v5p or tpu7x


class Ranges(NamedTuple):
  """The positions of a row in ranges of equal length.

  Attributes:
    count: R.
    keys: W, the positions of a range.
  """

  count: int
  keys: int


class Words(NamedTuple):
  """Latents as words of 32 bits, of which VMEM gives single rows.

  Attributes:
    compressed: a row for each latent. Two numbers of 16 bits share a word.
    rotary: the other numbers; one word each, and several latents to a row of lanes.
  """

  compressed: Int[Array, "B S w"]
  rotary: Int[Array, "B _ l"]


class Form(NamedTuple):
  """The form of a latent.

  Attributes:
    rank: c, its compressed numbers, the first ones.
    width: m, all of them.
    dtype: theirs.
  """

  rank: int
  width: int
  dtype: Any

  @property
  def is_packed(self) -> bool:
    """Do two compressed numbers share a word?"""
    return jnp.dtype(self.dtype).itemsize == 2 and self.rank % 2 == 0

  @property
  def lanes(self) -> int:
    """The lanes of a latent's rotary numbers: a power of two, or whole rows of lanes."""
    rotary = self.width - self.rank
    return max(1 << (rotary - 1).bit_length(), SUBLANES) if rotary <= LANES else rotary + -rotary % LANES

  @property
  def sharing(self) -> int:
    """The latents that share a row of lanes."""
    return max(1, LANES // self.lanes)

  @property
  def word_bytes(self) -> int:
    """The bytes of VMEM that the words of a latent take."""
    compressed = self.rank // 2 if self.is_packed else self.rank
    return 4 * (compressed + -compressed % LANES + self.lanes)

  @property
  def gradient_bytes(self) -> int:
    """The bytes of VMEM that its gradient takes, in fp32."""
    return 4 * (self.rank + -self.rank % LANES + self.lanes)


def split_positions(positions: int, bytes_per_key: int, bytes_beside: int = 0) -> Ranges:
  """Returns the fewest equal ranges that fit into VMEM, with so many bytes of other things beside them.

  >>> split_positions(131072, 1280), split_positions(131072, 3584)
  (Ranges(count=3, keys=43776), Ranges(count=8, keys=16384))
  """
  count = -(-positions // ((ROOM_BYTES - bytes_beside) // bytes_per_key // LANES * LANES))
  keys = -(-positions // count)
  return Ranges(count, keys + -keys % LANES)


def pack(latents: Float[Array, "B S m"], form: Form, length: int) -> Words:
  """Latents as words, filled up to `length` rows.

  A word is a number in fp32; the upper halves of two, where numbers have 16 bits: number i of the first half of the
  compressed ones below, of the second half above.
  """
  bits = jax.lax.bitcast_convert_type(latents.astype(jnp.float32), jnp.uint32)
  compressed, rotary = jnp.split(bits, [form.rank], axis=-1)
  if form.is_packed:
    low, high = jnp.split(compressed, 2, axis=-1)
    compressed = low >> 16 | high

  rows = (0, length - latents.shape[1])
  compressed = jnp.pad(compressed, ((0, 0), rows, (0, -compressed.shape[2] % LANES)))
  rotary = jnp.pad(rotary, ((0, 0), rows, (0, form.lanes - rotary.shape[2])))
  rotary = rotary.reshape(latents.shape[0], -1, form.sharing * form.lanes)
  return Words(*(jax.lax.bitcast_convert_type(words, jnp.int32) for words in (compressed, rotary)))


def unpack(compressed: Int[Array, "n w"], rotary: Int[Array, "n l"], form: Form) -> Float[Array, "n m"]:
  """Latents from their words, the rotary ones in the first lanes."""
  parts = [compressed[:, : form.rank], rotary[:, : form.width - form.rank]]
  if form.is_packed:
    shared = compressed[:, : form.rank // 2]
    parts = [shared << 16, shared & -(2**16), parts[1]]
  numbers = [jax.lax.bitcast_convert_type(part, jnp.float32).astype(form.dtype) for part in parts]
  return jnp.concatenate(numbers, axis=1)
