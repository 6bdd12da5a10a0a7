"""Slots that overflow, and slots whose last user was not finite."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from toys.engine_toy import DENSE, MOE, SMALL, assert_agrees, params_of, play, prompt, scheduler_of, single_turns

from sao_jax.sampler import steps
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.prefill import Extension, PrefillCall


def lying_extend(engine, extension):
  """`Engine.extend` without the host's check."""
  for call in engine._programs.plan_extend([extension]):
    engine._extend(call, engine._weights)


def test_an_extension_beyond_the_cache_is_flagged_and_writes_nothing():  # L10
  engine = Engine(params_of(DENSE), DENSE, SMALL, seed=0)
  engine.extend([Extension(1, 0, prompt(20, 0), 7, budget=8), Extension(2, 0, prompt(46, 1), 8, budget=2)])
  before = jax.device_get(engine._state)
  lying_extend(engine, Extension(2, 45, prompt(5, 2), 8, budget=2))  # positions 45 ... 48 of 48
  after = jax.device_get(engine._state)
  jax.tree.map(np.testing.assert_array_equal, after.cache, before.cache)
  assert after.slots.overflow.tolist() == [False, False, True, False]
  assert after.slots.active.tolist() == [False, True, False, False]
  assert after.slots.lengths.tolist() == before.slots.lengths.tolist() == [0, 19, 45, 0]
  _, _, emitted, overflow, _ = engine.decode(4, {1: 19, 2: 45}).fetch()
  assert overflow.tolist() == [False, False, True, False]
  assert emitted[:, 1].all() and not emitted[:, 2].any()
  lying_extend(engine, Extension(2, 45, prompt(4, 2), 8, budget=0))  # positions 45 ... 47: the last ones
  fits = jax.device_get(engine._state)
  assert not fits.slots.overflow.any() and fits.slots.lengths[2] == 48
  assert np.all(np.any(fits.cache.k[2, ..., 45:] != before.cache.k[2, ..., 45:], axis=-2))
  np.testing.assert_array_equal(fits.cache.k[2, ..., :45], before.cache.k[2, ..., :45])


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_a_slot_recovers_from_a_sequence_that_was_not_finite(model):
  """Its weights on what the last user left behind are 0, and 0 · NaN is NaN."""
  broken = jax.tree.map(lambda leaf: leaf * np.float32("nan"), params_of(model))
  scheduler = scheduler_of(model, params=broken)
  for record in play(scheduler, single_turns(4)):
    assert np.isnan(np.array(record.logprobs)[record.mask]).all()  # shown, so that evidence checks can refuse it
  cache = scheduler._engine._state.cache
  assert np.isnan(cache.k).any(axis=(1, 2, 3, 4)).all() and np.isnan(cache.v).any(axis=(1, 2, 3, 4)).all()
  scheduler.publish(params_of(model), 1)
  for record in play(scheduler, single_turns(4)):
    assert_agrees(model, params_of(model), record)


def test_a_prefill_updates_the_cache_in_place():
  engine = Engine(params_of(DENSE), DENSE, SMALL, seed=0)
  shape = "f32[" + ",".join(map(str, engine._state.cache.k.shape)) + "]"
  for window in (0, 48):
    compiled = steps.extend.lower(
      engine.params, engine._state, *PrefillCall([], 1, 8, window).arrays(4),
      config=DENSE, window=window, layout=engine._programs.sizes.layout,
    ).compile()  # fmt: skip
    copies = [line for line in compiled.as_text().splitlines() if "copy(" in line and f"= {shape}" in line]
    assert not copies, copies
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * engine._state.cache.k.nbytes
