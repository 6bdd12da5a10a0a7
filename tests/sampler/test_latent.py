"""The engine with latent, sparse attention: a cache of latents only, and the learner's log-probs from it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from toys import latent_toy as toy
from toys.engine_toy import assert_agrees, multi_turns, params_of, play, scheduler_of, single_turns

from sao_jax.config import MeshConfig
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import SAMPLER_RULES, Layout
from sao_jax.parallel.mesh import make_mesh
from sao_jax.sampler.cache import read_window, write_rows
from sao_jax.sampler.caches import empty_cache
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.latent_cache import LatentCache
from sao_jax.sampler.scheduler import Scheduler

LATENT = dataclasses.replace(
  toy.CONFIG, vocab_size=61, num_layers=3, indexer_types=("full", "shared", "full"), index_topk=6, num_experts=4,
  d_ff_expert=16, num_dense_layers=1, initializer_range=0.3, yarn=toy.YARN,
)  # fmt: skip
EVERYTHING = dataclasses.replace(LATENT, index_topk=0)


@pytest.mark.parametrize("model", [LATENT, EVERYTHING], ids=["sparse", "all positions"])
def test_logprobs_equal_the_learners(model):
  """Absorbed attention over the cache against expanded attention over packed rows, up to 48 tokens, 6 of them read."""
  scheduler = scheduler_of(model, park_after=0)
  for record in play(scheduler, single_turns()) + play(scheduler, multi_turns(), delay=2):
    assert_agrees(model, params_of(model), record)
  assert scheduler.stats()["parked"] > 0


def test_a_token_costs_one_latent_a_layer_and_one_key_an_indexer():
  cache = empty_cache(LATENT, 4, 48, "bfloat16")
  assert cache.latent.shape == (4, 3, 48, 12 + 4) and cache.index.shape == (4, 2, 48, 9)
  assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == 4 * 48 * 2 * (3 * 16 + 2 * 9)
  assert empty_cache(EVERYTHING, 4, 48, "bfloat16").index is None


def test_writing_and_reading_latents():
  def numbered(rows, length, first):
    latent = first + np.arange(rows * 3 * length * 16, dtype=np.float32).reshape(rows, 3, length, 16)
    return LatentCache(latent, first + np.arange(rows * 2 * length * 9, dtype=np.float32).reshape(rows, 2, length, 9))

  old, new = numbered(3, 7, 0.0), numbered(2, 4, 1e5)
  array = lambda *x: np.asarray(x, np.int32)
  result = jax.jit(write_rows)(old, new, array(2, 0), array(5, 0), array(2, 3))
  for before, rows, after in ((old.latent, new.latent, result.latent), (old.index, new.index, result.index)):
    expected = before.copy()
    expected[2, :, 5:7], expected[0, :, :3] = rows[0, :, :2], rows[1, :, :3]
    np.testing.assert_array_equal(after, expected)
  window = read_window(result, array(2, 3), 6)
  np.testing.assert_array_equal(window.latent[0], result.latent[2, :, :6])
  assert window.index.shape == (2, 2, 6, 9)


def test_a_mesh_samples_what_one_device_samples():
  model = dataclasses.replace(LATENT, vocab_size=64, num_layers=2, indexer_types=("full", "shared"))
  mesh = make_mesh(MeshConfig(data=2, fsdp=1, expert=2, tensor=2), jax.devices()[:8])
  sharded = jax.device_put(params_of(model), Layout(mesh, SAMPLER_RULES).param_shardings(param_specs(model)))
  engine = Engine(sharded, model, scheduler_of(model)._engine.config, seed=0, mesh=mesh)
  latent = engine._state.cache.latent
  assert latent.sharding.shard_shape(latent.shape) == (1, 2, 48, 16)  # slots over data and expert; all heads read it
  expected, got = play(scheduler_of(model), multi_turns(3)), play(Scheduler(engine), multi_turns(3))
  for one, other in zip(expected, got, strict=True):
    assert one.ids == other.ids
    np.testing.assert_allclose(np.array(one.logprobs), np.array(other.logprobs), atol=1e-4)
