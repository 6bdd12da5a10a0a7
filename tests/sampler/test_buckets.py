"""Static sizes, and how prefills are cut into calls of them."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.config import SamplerConfig
from sao_jax.sampler import buckets
from sao_jax.sampler.prefill import Extension, cut, plan_calls


def test_defaults():
  config = SamplerConfig(num_slots=64, context_length=300, prefill_batch=8)
  assert buckets.window_buckets(config) == (64, 128, 256, 300)
  assert buckets.prefix_windows(config) == (128, 300)
  assert buckets.prefill_buckets(config) == (16, 64, 256)
  assert buckets.decode_batches(config) == (8, 32)
  assert buckets.prefill_batches(config) == (1, 2, 8)


def test_small_and_given_sizes():
  config = SamplerConfig(num_slots=3, context_length=40, window_buckets=(50, 20), prefill_batch=1, decode_batch=99)
  assert buckets.window_buckets(config) == (20, 40)
  assert buckets.prefix_windows(config) == (40,)
  assert buckets.prefill_buckets(config) == (16, 40)
  assert buckets.decode_batches(config) == (3,)
  assert buckets.prefill_batches(config) == (1,)
  assert buckets.decode_batches(dataclasses.replace(config, num_slots=70)) == (8, 17, 70)


def test_smallest_bucket():
  assert [buckets.smallest_bucket((4, 9), size) for size in (0, 4, 5, 9, 10)] == [4, 4, 9, 9, 9]


@given(
  st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=12),
  st.sampled_from([(1,), (1, 4), (2,), (1, 2, 8)]),
)
def test_calls_write_every_token_once_and_in_order(shapes, batches):
  extensions = [
    Extension(slot, start, list(range(start, start + length)), rollout_id=slot, budget=5, stop_ids=(3,))
    for slot, (length, start) in enumerate(shapes)
  ]
  written = {e.slot: e.start for e in extensions}
  active = set()
  for call in plan_calls(extensions, lengths=(4, 16), windows=(32, 128), batches=batches):
    token_ids, counts, slots, fields = call.arrays(num_slots=99)
    assert token_ids.shape == (call.rows, call.length) and call.rows in batches
    assert len(call.pieces) == call.rows or call.rows == batches[0]
    for row, slot in enumerate(slots.tolist()):
      if slot == 99:
        assert counts[row] == 0 and not fields.active[row]
        continue
      assert slot not in active and fields.lengths[row] == written[slot] <= call.window
      np.testing.assert_array_equal(token_ids[row, : counts[row]], written[slot] + np.arange(counts[row]))
      written[slot] += int(counts[row])
      if fields.active[row]:
        active.add(slot)
        assert fields.pending_token[row] == written[slot] and fields.stop_ids[row].tolist() == [3] + [-1] * 7
  assert active == set(written)
  assert all(written[e.slot] == e.start + len(e.token_ids) - 1 for e in extensions)


def test_nothing_to_write_is_one_piece():
  pieces = cut(Extension(0, 7, [5], rollout_id=0, budget=1), longest=16)
  assert [(piece.start, piece.count, piece.last) for piece in pieces] == [(7, 0, True)]
