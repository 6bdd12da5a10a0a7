"""The positions of the k largest scores, exactly, without sorting: of a long row, a sort costs more than the scores.

The k-th largest score is found digit by digit, by counting. What is chosen becomes a bit per position, sixteen to a
word, and the j-th chosen position is the tile, the word and the bit where the count of bits passes j. That takes a few
passes over the scores, in which rows stay rows of vectors, and one gather of small rows. It is the same on every
backend, where sorts differ in which of two equal scores comes first.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

DIGIT_BITS = 2  # more: fewer passes over the scores, and more comparisons in each
WORD_BITS = 16  # a sum of as many powers of two is exact in every precision of products
TILE = 256  # positions; the words of a tile are gathered together

NOTHING = np.int32(np.iinfo(np.int32).min)  # the key of a position that may not be read


def top_positions(
  scores: Float[Array, "*batch S"], readable: Bool[Array, "*batch S"], num_selected: int
) -> Int[Array, "*batch k"]:
  """The readable positions with the `num_selected` highest scores, ascending; all where no more are readable, then -1.

  Of equal scores the lower position wins, so that the result depends neither on the backend nor on padding.
  """
  keys = readable_keys(scores, readable)
  above, tied = pack_chosen(keys, kth_largest(keys, num_selected))
  return first_of(above, tied, num_selected)


def pack_chosen(
  keys: Int[Array, "*batch S"], threshold: Int[Array, "*batch"]
) -> tuple[Int[Array, "*batch n w"], Int[Array, "*batch n w"]]:
  """The keys above the threshold, and those that equal it, as bits; in whole tiles of positions."""
  tile, length = whole_tiles(keys.shape[-1])
  pad = [(0, 0)] * (keys.ndim - 1) + [(0, length - keys.shape[-1])]
  keys, threshold = jnp.pad(keys, pad, constant_values=NOTHING), threshold[..., None]
  return pack(keys > threshold, tile), pack((keys == threshold) & (threshold > NOTHING), tile)


def whole_tiles(length: int) -> tuple[int, int]:
  """The positions of a tile, and of as many of them as `length` positions need."""
  tile = min(TILE, -(-length // WORD_BITS) * WORD_BITS)
  return tile, -(-length // tile) * tile


def first_of(
  above: Int[Array, "*batch n w"], tied: Int[Array, "*batch n w"], num_selected: int
) -> Int[Array, "*batch k"]:
  """The positions of all bits above, and of as many of the tied ones as there is room for; see `pack_chosen`."""
  room = num_selected - jnp.sum(jax.lax.population_count(above), axis=(-2, -1), dtype=jnp.int32)
  return set_bits(above | first_bits(tied, room), num_selected)


def readable_keys(scores: Float[Array, "*batch S"], readable: Bool[Array, "*batch S"]) -> Int[Array, "*batch S"]:
  """The keys of scores, `NOTHING` where a position may not be read."""
  return jnp.where(readable, ordered_keys(scores), NOTHING)


def ordered_keys(scores: Float[Array, "*batch S"]) -> Int[Array, "*batch S"]:
  """Integers in the order of the scores; -0 equals 0."""
  bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores.astype(jnp.float32)), jnp.int32)
  return jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def kth_largest(keys: Int[Array, "*batch S"], k: int) -> Int[Array, " *batch"]:
  """The k-th largest key, or the smallest integer where there are fewer than k above it."""
  return kth_by_counting(lambda bounds: count_at_least(keys, bounds), keys.shape[:-1], k)


def count_at_least(keys: Int[Array, "*batch S"], bounds: Int[Array, "*batch n"]) -> Int[Array, "*batch n"]:
  """The number of keys that are no smaller than each bound."""
  return jnp.sum(keys[..., None, :] >= bounds[..., None], axis=-1, dtype=jnp.int32)


def kth_by_counting(
  count: Callable[[Int[Array, "*batch n"]], Int[Array, "*batch n"]], shape: tuple[int, ...], k: int
) -> Int[Array, " *batch"]:
  """`kth_largest` of keys that need not be one array: `count` tells how many are no smaller than each bound."""
  digits = jnp.arange(1, 2**DIGIT_BITS, dtype=jnp.int32)

  def add_digit(step: jax.Array, threshold: jax.Array) -> jax.Array:
    bounds = threshold[..., None] + (digits << (32 - DIGIT_BITS * (step + 1)))  # integers wrap round
    digit = jnp.sum(count(bounds) >= k, axis=-1, dtype=jnp.int32)
    return threshold + (digit << (32 - DIGIT_BITS * (step + 1)))

  return jax.lax.fori_loop(0, 32 // DIGIT_BITS, add_digit, jnp.full(shape, NOTHING))


def pack(chosen: Bool[Array, "*batch S"], tile: int) -> Int[Array, "*batch n w"]:
  """Sixteen positions to a word, lower positions in lower bits; as a product, which leaves the rows as they are."""
  position = np.arange(tile)
  powers = np.zeros((tile, tile // WORD_BITS), np.float32)
  powers[position, position // WORD_BITS] = 2.0 ** (position % WORD_BITS)
  bits = chosen.reshape(*chosen.shape[:-1], -1, tile).astype(jnp.float32)
  return jnp.dot(bits, powers, preferred_element_type=jnp.float32).astype(jnp.int32)


def first_bits(words: Int[Array, "*batch n w"], count: Int[Array, " *batch"]) -> Int[Array, "*batch n w"]:
  """The lowest `count` bits that are set in all words of a row together; the others become 0."""
  bits = jax.lax.population_count(words)
  in_tile = jnp.cumsum(bits, axis=-1)
  before = in_tile - bits + (jnp.cumsum(in_tile[..., -1], axis=-1) - in_tile[..., -1])[..., None]
  wanted = count[..., None, None] - before
  partial = words & ((1 << nth_bit(words, wanted)) - 1)
  return jnp.where(wanted >= bits, words, jnp.where(wanted > 0, partial, 0))


def set_bits(words: Int[Array, "*batch n w"], count: int) -> Int[Array, "*batch k"]:
  """The positions of the first `count` bits that are set, then -1."""
  num_words = words.shape[-1]
  bits = jnp.sum(jax.lax.population_count(words), axis=-1)
  ends = jnp.cumsum(bits, axis=-1)
  number = jnp.arange(count, dtype=jnp.int32)

  # The tile of the j-th bit is the number of tiles that end before it.
  tile = jnp.sum(ends[..., None, :] <= number[:, None], axis=-1, dtype=jnp.int32)
  table = jnp.concatenate([words, (ends - bits)[..., None]], axis=-1)
  rows = jnp.take_along_axis(table, jnp.minimum(tile, words.shape[-2] - 1)[..., None], axis=-2)
  own, rank = rows[..., :-1], number - rows[..., -1]

  # In the same way the word in the tile, and the bit in the word.
  ends_in_tile = jnp.cumsum(jax.lax.population_count(own), axis=-1)
  word = jnp.sum(ends_in_tile <= rank[..., None], axis=-1, dtype=jnp.int32)
  here = word[..., None] == jnp.arange(num_words, dtype=jnp.int32)
  pick = lambda values: jnp.sum(jnp.where(here, values, 0), axis=-1, dtype=jnp.int32)
  rank = rank - pick(ends_in_tile - jax.lax.population_count(own))
  position = (tile * num_words + word) * WORD_BITS + nth_bit(pick(own), rank)
  return jnp.where(number < ends[..., -1:], position, -1)


def nth_bit(words: Int[Array, "*batch"], number: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
  """The index of bit number `number`, counted from 0, of those that are set in a word; by halving it."""
  index, width = jnp.zeros_like(words), WORD_BITS // 2
  while width:
    low = jax.lax.population_count((words >> index) & ((1 << width) - 1))
    skip = number >= low
    index, number = jnp.where(skip, index + width, index), jnp.where(skip, number - low, number)
    width //= 2
  return index
