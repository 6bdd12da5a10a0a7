"""Tokens that travel to their experts: every token gets there once and comes back, in as many rounds as it takes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models import expert_buffer
from sao_jax.models.expert_dispatch import Group, Plan, combine, dispatch, dispatch_pays, received_rows, slices

DEVICES, N, K = 8, 8, 2  # two experts on each device


@functools.cache
def program():
  """Multiplies every token by the number of its experts on each device, and counts the rounds."""
  mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  group = Group(("a", "b"), DEVICES, ("a", "b"), "cpu")

  def compute(rounds, ids, x):
    here = jnp.sum((ids >= 0) & (ids < 2), axis=1, keepdims=True)
    return rounds + 1, (x * here, here)

  def shard(experts, x):
    rounds, results = dispatch(compute, jnp.int32(0), experts[0], (x[0],), num_experts=2, group=group)
    return rounds[None], *(result[None] for result in results)

  spec = jax.sharding.PartitionSpec(("a", "b"))
  return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(spec, spec), out_specs=(spec,) * 3, check_vma=False))


def routings():
  """Experts of all tokens, with the rounds that they take: a device has room for 24 of the 64 tokens at a time."""
  rng = np.random.default_rng(0)
  even = (np.arange(DEVICES * N)[:, None] + [0, 8]) % 16
  nowhere = rng.integers(-3, 20, (DEVICES * N, K))
  return {
    "even": (even, 1),
    "all to one expert": (np.full_like(even, 5), 3),
    "both experts on one device": (np.tile([[6, 7]], (DEVICES * N, 1)), 3),
    "all to one device, with one expert": (np.stack([np.full(DEVICES * N, 3), even[:, 0]], 1), 3),
    "some that live nowhere": (nowhere, 1),
    "none": (np.full_like(even, -1), 0),
  }


@pytest.mark.parametrize("name", routings())
def test_every_token_meets_its_experts_once(monkeypatch, name):
  monkeypatch.setattr(expert_buffer, "FEW_PAIRS", 0)
  assert received_rows(N, K, DEVICES) == 24
  experts, expected_rounds = routings()[name]
  x = np.random.default_rng(1).normal(size=(DEVICES, N, 3)).astype(np.float32)
  rounds, out, count = program()(jnp.asarray(experts.reshape(DEVICES, N, K), jnp.int32), x)
  valid = np.sum((experts >= 0) & (experts < 2 * DEVICES), axis=1).reshape(DEVICES, N, 1)
  np.testing.assert_allclose(out, x * valid, rtol=1e-6)
  np.testing.assert_array_equal(count, valid)
  np.testing.assert_array_equal(rounds, np.full(DEVICES, expected_rounds))


def test_rounds_take_every_row_once_and_back_to_its_place():
  """By hand over all devices: where a row lands there is from where it is sent back."""
  rng = np.random.default_rng(0)
  devices, rows = 3, 5
  counts = jnp.asarray(rng.integers(0, 6, (devices, devices)), jnp.int32)
  left = [set(range(int(total))) for total in counts.sum(1)]
  for number in range(-(-int(counts.sum(0).max()) // rows)):
    ways = [way for me in range(devices) for way in slices(counts, jnp.int32(me), jnp.int32(number), rows)]
    each = [[np.asarray(one) for one in way] for way in ways]
    there, back = each[::2], each[1::2]
    for receiver in range(devices):
      places = [p + i for own in there for p, size in [(own[2][receiver], own[1][receiver])] for i in range(size)]
      assert sorted(places) == list(range(len(places))) and len(places) <= rows
    for sender, own in enumerate(there):
      for start, size in zip(own[0], own[1]):
        left[sender] -= set(range(start, start + size))
      np.testing.assert_array_equal(own[3], [other[1][sender] for other in there])
      np.testing.assert_array_equal(own[0], [other[2][sender] for other in back])
      np.testing.assert_array_equal(own[2], [other[0][sender] for other in back])
      np.testing.assert_array_equal(own[1], back[sender][3])
  assert not any(left)


def test_what_comes_back_is_added_up_in_fp32():
  """In bf16, 256 + 1 is 256. The second token went to one device only."""
  plan = Plan(
    tokens=jnp.asarray([0, 1, 0, 0]),
    places=jnp.asarray([[0, 1], [2, 0], [3, 0]]),
    first=jnp.asarray([[True, True], [True, False], [True, False]]),
    counts=jnp.zeros((3, 3), jnp.int32),
  )
  rows = jnp.asarray([[256.0], [7.0], [1.0], [1.0]], jnp.bfloat16)
  np.testing.assert_array_equal(combine(rows, plan).astype(jnp.float32), [[258.0], [7.0]])


def test_tokens_travel_where_a_device_then_holds_fewer():
  """GLM-5.2 learns with expert=8 and samples with expert=64, at eight experts per token."""
  assert not dispatch_pays(8, 8) and dispatch_pays(64, 8)
  for devices, num_active in ((4, 2), (8, 4), (8, 8), (16, 8), (64, 8)):
    fewer = received_rows(4096, num_active, devices) < devices * 4096
    assert fewer == dispatch_pays(devices, num_active)
  assert received_rows(4096, 8, 8) == 8 * 4096  # all tokens, in one round
