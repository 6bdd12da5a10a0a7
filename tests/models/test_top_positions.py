"""The k best positions: exact, the lower one of equal scores, independent of padding, ascending."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.models.attention.top_positions import kth_largest, nth_bit, ordered_keys, top_positions

best_of = jax.jit(top_positions, static_argnums=2)
keys_of, largest = jax.jit(ordered_keys), jax.jit(kth_largest, static_argnums=1)


def by_sorting(scores, readable, k):
  """The same with a sort by score and position."""
  best = sorted(sorted(np.flatnonzero(readable), key=lambda s: (-scores[s], s))[:k])
  return best + [-1] * (k - len(best))


def test_of_equal_scores_the_lower_position_wins():
  scores = jnp.asarray([[0.0, 2.0, 0.0, -0.0, 1.0, 0.0], [3.0] * 6, [-1.0, -2.0, -2.0, 5.0, -2.0, 9.0]], jnp.float32)
  allowed = jnp.asarray([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0]], jnp.bool_)
  expected = [[0, 1, 4], [1, 2, 3], [0, 1, 2]]
  assert best_of(scores, allowed, 3).tolist() == expected
  # -0 is no less than 0, and what lies around the allowed positions changes nothing.
  assert best_of(scores.at[0, 0].set(-0.0), allowed, 3).tolist() == expected
  shifted = jnp.pad(scores, ((0, 0), (2, 300)), constant_values=7.0)
  assert (best_of(shifted, jnp.pad(allowed, ((0, 0), (2, 300))), 3) - 2).tolist() == expected


@pytest.mark.parametrize("length", [5, 16, 300, 700])  # less than a word, one word, tiles of 256
def test_the_choice_is_that_of_sorting_by_score_and_position(length):
  rng = np.random.default_rng(length)
  coarse, fine = rng.integers(-3, 4, size=(6, length)), rng.normal(size=(6, length))
  scores = np.where(rng.random((6, length)) < 0.7, coarse, fine).astype(np.float32)  # many ties, among the negative too
  scores[0, :2] = np.inf, -np.inf
  readable = rng.random((6, length)) < np.array([[1.0], [0.6], [0.3], [0.02], [1.0], [0.5]])
  readable[3, -1] = True
  for k in (1, 6, 40):
    expected = [by_sorting(*row, k) for row in zip(scores, readable, strict=True)]
    assert best_of(scores, readable, k).tolist() == expected


def test_fewer_readable_positions_than_k_are_all_chosen():
  readable = np.zeros((1, 40), bool)
  readable[0, [3, 39]] = True
  assert best_of(np.full((1, 40), -np.inf, np.float32), readable, 4).tolist() == [[3, 39, -1, -1]]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_subnormal=False), min_size=9, max_size=9))
def test_keys_are_in_the_order_of_the_scores(values):
  scores = np.asarray(values, np.float32)
  keys = np.asarray(keys_of(scores))
  np.testing.assert_array_equal(keys[:, None] < keys, scores[:, None] < scores)
  ordered = sorted(keys.tolist(), reverse=True)
  assert [int(largest(keys, k)) for k in (1, 4, 9)] == [ordered[0], ordered[3], ordered[8]]


def test_the_bits_of_words_are_found_by_their_number():
  words = np.asarray([0b1011, 0b1000000000000001, 0xFFFF], np.int32)
  for word, bits in zip(words, ([0, 1, 3], [0, 15], list(range(16))), strict=True):
    assert [int(nth_bit(jnp.int32(word), jnp.int32(n))) for n in range(len(bits))] == bits
