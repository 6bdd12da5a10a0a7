"""Decode of shallow models on a CPU: straight code samples what the loop over layers does, and copies less."""

from __future__ import annotations

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
from sao_jax.sampler.sampling import SamplingRule

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
  assert straight.runs_straight(given[0], model, ONE_DEVICE)
  (state, sampled), program = (jax.jit(decode(model, window))(*given), decode(model, window))
  monkeypatch.setattr(straight, "UNROLLED_LAYERS", 0)
  other_state, expected = jax.jit(program)(*given)

  np.testing.assert_array_equal(sampled.tokens, expected.tokens)
  np.testing.assert_allclose(sampled.logprobs, expected.logprobs, atol=1e-5)
  if model.num_experts:
    np.testing.assert_array_equal(sampled.routed_experts, expected.routed_experts)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, other_state)


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
