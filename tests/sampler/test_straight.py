"""Decode of shallow models on a CPU: straight code samples what the loop over layers does, and copies less."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from toys.engine_toy import DENSE, MOE, SMALL, params_of, prompt

from sao_jax.parallel.layout import ONE_DEVICE
from sao_jax.sampler import steps, straight
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.prefill import Extension
from sao_jax.sampler.programs import Sizes
from sao_jax.sampler.sampling import SamplingRule
from sao_jax.sampler.slot_programs import DecodeCall, SlotPrograms

SLOTS = np.array([0, 1, 2, SMALL.num_slots], np.int32)  # the last row is unused


def started(model):
  engine = Engine(params_of(model), model, SMALL, seed=3)
  engine.extend([Extension(slot, 0, prompt(3 + 3 * slot, slot), slot, budget=9) for slot in range(3)])
  return engine.params, engine._state


def decode(model, window):
  """Four steps, traced anew."""

  def run(params, state):
    arguments = params, state, jax.random.key(0), jnp.asarray(SLOTS), jnp.int32(4)
    static = {"config": model, "rule": SamplingRule(), "window": window, "max_steps": 4, "layout": ONE_DEVICE}
    keep = {"keep_experts": model.num_experts > 0}
    return steps.decode.__wrapped__(*arguments, **static, **keep)

  return run


@pytest.mark.parametrize(
  ("model", "window"), [(DENSE, 16), (MOE, SMALL.context_length)], ids=["dense in a window", "moe in the whole cache"]
)
def test_equals_the_loop_over_layers(model, window, monkeypatch):
  given = started(model)
  assert straight.runs_straight(model, ONE_DEVICE)
  (state, sampled), program = (jax.jit(decode(model, window))(*given), decode(model, window))
  monkeypatch.setattr(straight, "UNROLLED_LAYERS", 0)
  other_state, expected = jax.jit(program)(*given)

  np.testing.assert_array_equal(sampled.tokens, expected.tokens)
  np.testing.assert_allclose(sampled.logprobs, expected.logprobs, atol=1e-5)
  if model.num_experts:
    np.testing.assert_array_equal(sampled.routed_experts, expected.routed_experts)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, other_state)


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_half_of_the_rows_may_have_a_shorter_window(model):
  """Rows in any order, the shorter ones first, sample what all of them do in the long window."""
  params, state = started(model)
  static = {"config": model, "rule": SamplingRule(), "max_steps": 4, "layout": ONE_DEVICE}

  def sampled(slots, **windows):
    program = jax.jit(functools.partial(steps.decode.__wrapped__, **static, **windows))
    return program(params, state, jax.random.key(0), jnp.asarray(slots, jnp.int32), jnp.int32(4))

  # Slots 0, 1 and 2 hold 2, 5 and 8 tokens; in the long window row r is slot r.
  long_state, expected = sampled(SLOTS, window=16)
  short_state, got = sampled([SMALL.num_slots, 0, 1, 2], window=16, short=4)
  np.testing.assert_array_equal(got.tokens[:, 1:], expected.tokens[:, :3])
  np.testing.assert_allclose(got.logprobs[:, 1:], expected.logprobs[:, :3], atol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), short_state, long_state)


def test_a_call_puts_the_shorter_rows_first_where_they_fit():
  sampler = dataclasses.replace(SMALL, num_slots=16, decode_batch=16, context_length=64, window_buckets=(8, 16, 32))
  programs = SlotPrograms(Sizes(DENSE, sampler, SamplingRule(), "float32", False, ONE_DEVICE))
  lengths = {slot: 30 - slot for slot in range(14)}  # 17 ... 30 tokens
  assert programs.plan_decode(lengths, 4).short == 0

  # Two rows are unused, so six of at most 16 tokens fill the short half.
  lengths |= {slot: 16 - slot for slot in range(6)}
  call = programs.plan_decode(lengths, 4)
  assert (call.window, call.short) == (32, 16)
  assert call.slots[:8].tolist() == [16, 16, 5, 4, 3, 2, 1, 0]
  assert sorted(call.slots[8:].tolist()) == list(range(6, 14))

  # Every call that is planned has been warmed up.
  shapes = {call.shape for call in programs.idle_calls(False) if isinstance(call, DecodeCall)}
  rng = np.random.default_rng(0)
  for count in rng.integers(1, 17, 200):
    lengths = dict(zip(rng.permutation(16)[:count].tolist(), rng.integers(1, 64, count).tolist(), strict=True))
    call = programs.plan_decode(lengths, 4)
    limit = np.where(np.arange(len(call.slots)) < len(call.slots) // 2, call.short or call.window, call.window)
    assert call.shape in shapes
    assert sorted(slot for slot in call.slots.tolist() if slot < 16) == sorted(lengths)
    assert all(lengths[slot] <= most for slot, most in zip(call.slots.tolist(), limit, strict=True) if slot < 16)


def body_of_the_loop_over_tokens(jaxpr):
  """All equations in the body of the loop that samples."""

  def inside(jaxpr):
    for equation in jaxpr.eqns:
      yield equation
      for inner in jaxprs_in_params(equation.params):
        yield from inside(inner)

  loops = [equation for equation in inside(jaxpr) if equation.primitive.name == "while"]
  bodies = [list(inside(equation.params["body_jaxpr"].jaxpr)) for equation in loops]
  return max(bodies, key=len)


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_the_loop_over_tokens_copies_no_layer(model):
  """A slice of a stack would be a copy in every step on a CPU; sines would be computed for every layer and head."""
  shapes = jax.eval_shape(lambda *given: given, *started(model))
  body = body_of_the_loop_over_tokens(jax.make_jaxpr(decode(model, 16))(*shapes).jaxpr)
  assert sum(equation.primitive.name == "dot_general" for equation in body) > 10
  assert not [equation for equation in body if equation.primitive.name in ("sin", "cos", "scan")]

  # What a step itself makes and slices is smaller than any matrix of a layer.
  sliced = [e.outvars[0].aval for e in body if e.primitive.name in ("slice", "dynamic_slice")]
  matrix = shapes[0]["dense_layers"]["attention"]["k"].shape[1:]
  assert [aval.shape for aval in sliced if aval.size >= math.prod(matrix)] == []
