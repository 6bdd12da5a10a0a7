"""The engine on a mesh of simulated devices samples what it samples on one."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import numpy as np
import pytest

from sao_jax.config import MeshConfig, ModelConfig, SamplerConfig
from sao_jax.errors import ConfigError
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import SAMPLER_RULES, Layout
from sao_jax.parallel.mesh import make_mesh
from sao_jax.parallel.params import init_params
from sao_jax.sampler import steps
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.prefill import PrefillCall
from sao_jax.sampler.requests import GenerateRequest
from sao_jax.sampler.scheduler import Scheduler

MODEL = ModelConfig(
  vocab_size=64,
  num_layers=1,
  d_model=32,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  num_experts=4,
  d_ff_expert=16,
  initializer_range=0.3,
)
CONFIG = SamplerConfig(
  num_slots=8, context_length=32, decode_steps=4, prefill_buckets=(8,), prefill_batch=4, window_buckets=(32,)
)


def sample(engine):
  scheduler, results = Scheduler(engine), {}
  rng = np.random.default_rng(0)
  for i in range(11):
    prompt = rng.integers(0, 64, 2 + i).tolist()
    scheduler.submit(GenerateRequest(i, i, prompt, 9), lambda done, i=i: results.setdefault(i, done))
  while len(results) < 11:
    scheduler.tick()
  return [results[i] for i in range(11)]


def test_mesh_equals_one_device():
  params = init_params(param_specs(MODEL), jax.random.key(0))
  expected = sample(Engine(params, MODEL, CONFIG, seed=0))
  mesh = make_mesh(MeshConfig(data=2, fsdp=1, expert=2, tensor=2), jax.devices()[:8])
  sharded = jax.device_put(params, Layout(mesh, SAMPLER_RULES).param_shardings(param_specs(MODEL)))
  engine = Engine(sharded, MODEL, CONFIG, seed=0, mesh=mesh)
  cache = engine._state.cache.k
  assert cache.sharding.shard_shape(cache.shape) == (2, 1, 1, 8, 32)  # slots over data and expert, kv heads over tensor
  for one, other in zip(expected, sample(engine), strict=True):
    np.testing.assert_array_equal(one.token_ids, other.token_ids)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
  after = engine._state.cache.k
  assert after.sharding.is_equivalent_to(cache.sharding, after.ndim)
  compiled = steps.decode._cache_size(), steps.extend._cache_size()
  sample(engine)
  assert (steps.decode._cache_size(), steps.extend._cache_size()) == compiled


def test_no_program_gathers_the_cache():
  """Each device writes the slots it holds. Prefill moves the prefixes of its rows, decode nothing that is cached."""
  model = dataclasses.replace(MODEL, num_layers=2)  # the last layer's attention is not needed by a prefill
  config = dataclasses.replace(CONFIG, num_slots=16, context_length=64, window_buckets=(64,))
  mesh = make_mesh(MeshConfig(data=2, fsdp=1, expert=2, tensor=2), jax.devices()[:8])
  specs = param_specs(model)
  params = jax.device_put(init_params(specs, jax.random.key(0)), Layout(mesh, SAMPLER_RULES).param_shardings(specs))
  engine = Engine(params, model, config, seed=0, mesh=mesh)
  cache = engine._state.cache.k
  static = {"config": model, "window": 64, "layout": engine._programs.sizes.layout}
  decode = steps.decode.lower(
    params, engine._state, jax.random.key(0), np.arange(16, dtype=np.int32), np.int32(4),
    rule=engine._programs.sizes.rule, max_steps=4, **static,
  )  # fmt: skip
  extend = steps.extend.lower(params, engine._state, *PrefillCall([], 4, 8, 64).arrays(16), **static)
  held, of_rows = cache.size // 8, cache.size // 16 * 4 // 2  # numbers per device; of 4 rows, half of the kv heads
  assert largest_collective(decode.compile().as_text()) < held // 4
  assert largest_collective(extend.compile().as_text()) <= of_rows


def largest_collective(program):
  """Numbers in the largest array that moves between devices."""
  names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
  found = re.findall(rf"= (.*?) (?:{names})(?:-start)?\(", program)
  assert found
  shapes = re.findall(r"\[([\d,]*)\]", " ".join(found))
  return max(math.prod(int(size) for size in shape.split(",") if size) for shape in shapes)


def test_slots_must_be_divisible():
  params = init_params(param_specs(MODEL), jax.random.key(0))
  mesh = make_mesh(MeshConfig(data=4, fsdp=1, tensor=2), jax.devices()[:8])
  with pytest.raises(ConfigError, match="num_slots"):
    Engine(params, MODEL, dataclasses.replace(CONFIG, num_slots=6), seed=0, mesh=mesh)
