"""Sampler against learner where they differ most: loops over layers, packed rows, bf16, and after an optimiser step."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys.engine_toy import (
  DENSE,
  MOE,
  REPREFILL,
  SMALL,
  Record,
  assert_agrees,
  learner_logprobs,
  multi_turns,
  params_of,
  play,
  policy_apply,
  prompt,
  scheduler_of,
)

from sao_jax.algorithm.network import guarded_update, replace_leaves, trainable_leaves
from sao_jax.algorithm.optimizer import make_optimizer
from sao_jax.config import OptimizerConfig, SamplerConfig
from sao_jax.episode import PromptKey, Status, Trajectory
from sao_jax.learner.packing import pack
from sao_jax.models import transformer
from sao_jax.models.attention.grouped import packed_attend
from sao_jax.models.transformer import head_logits, trunk
from sao_jax.parallel.publish import make_publish
from sao_jax.sampler.caches import empty_cache
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.kv_cache import cached_attend
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.types import NetworkState

DEEP = dataclasses.replace(DENSE, num_layers=5)
DEEP_MOE = dataclasses.replace(MOE, num_layers=6)  # the first one dense


@pytest.mark.parametrize("model", [DEEP, DEEP_MOE], ids=["dense", "moe behind a dense layer"])
def test_loops_over_layers_carry_the_cache(model):
  """Up to 4 layers are straight code, so this is another program: the cache travels in the carry of the loop."""
  stack = params_of(model)["moe_layers" if model.num_experts else "dense_layers"]
  assert stack["mlp_norm"].shape[0] > transformer.UNROLLED_LAYERS
  one_turn = [Record([(prompt(5 + i, i), 12)], rollout_id=i) for i in range(4)]
  for record in play(scheduler_of(model), one_turn if model is DEEP else multi_turns(4), delay=1):
    assert_agrees(model, params_of(model), record)


def trajectory(record):
  """What the rollout side makes of a session."""
  mask = np.array(record.mask)
  starts = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0) == 1)
  arrays = [np.array(x, t) for x, t in ((record.ids, np.int32), (mask, bool), (record.logprobs, np.float32))]
  versions = np.array(record.versions, np.int32)
  key = PromptKey("toy", record.rollout_id, 0)
  return Trajectory(*arrays, versions, starts.astype(np.int32), 1.0, Status.TERMINATED, key, record.rollout_id)


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_packed_rows_equal_the_sampler(model):
  """Five multi-turn sessions in one row of the learner; a publish with reprefill came in the middle of them."""
  publish = lambda tick: scheduler.publish(params_of(model, seed=9), 1) if tick == 2 else None
  scheduler = scheduler_of(model, REPREFILL, park_after=0)
  records = play(scheduler, multi_turns(5), publish, delay=1)
  batch = pack([trajectory(record) for record in records], (192,), (1,))
  assert batch.trajectory_ids.max() == 5
  assert any(len(set(record.versions) - {-1}) == 2 for record in records)
  for version, params in enumerate((params_of(model), params_of(model, seed=9))):
    logprobs = np.asarray(policy_apply(model)(params, batch).logprobs)
    where = batch.policy_version == version
    assert where.sum() > 10
    np.testing.assert_allclose(logprobs[where], batch.behavior_logprobs[where], atol=1e-4)


BF16 = dataclasses.replace(MOE, dtype="bfloat16", num_layers=3)  # a dense layer and two MoE ones


def test_bf16_activations():
  """Log-probs agree to what bf16 explains, and both sides choose the same experts for every token.

  Both sides round activations to 8 bits, 2^-9 of their size, at the same places, but add in different orders before
  they round. Logits of size 8 that differ by a few such roundings (0.016) give log-probs that agree to about 0.05. The
  router is fp32 on rounded activations: its choice could differ only where two experts are equal to bf16.
  """
  config = SamplerConfig(
    num_slots=1, context_length=48, decode_steps=4, decode_batch=1, prefill_buckets=(8,), prefill_batch=1
  )
  params = params_of(BF16)
  record = Record([(prompt(9, 1), 16), (prompt(5, 2), 16)], rollout_id=0)
  play(Scheduler(Engine(params, BF16, config, seed=0, keep_experts=True)), [record])
  ids, positions = jnp.asarray([record.ids], jnp.int32), jnp.arange(len(record.ids), dtype=jnp.int32)[None]
  attend = packed_attend(jnp.ones_like(ids))
  learned = jax.jit(lambda params: trunk(params, BF16, ids, positions, attend=attend)[2].experts)(params)
  sampled = np.concatenate(record.experts)  # [T - 1, L, k]; the last token was never read
  np.testing.assert_array_equal(sampled, np.moveaxis(learned[:, 0], 0, 1)[:-1])
  assert len(np.unique(sampled)) == BF16.num_experts
  difference = np.abs(learner_logprobs(BF16, params, record) - np.array(record.logprobs))[record.mask]
  assert difference.max() < 0.05


@functools.partial(jax.jit, static_argnums=1)
def sampler_logprobs(params, model, ids):
  """Log-probs of given tokens, each read behind the cache of those before it as decode does."""
  past, new = (empty_cache(model, 1, length, "float32") for length in (0, len(ids)))

  def step(new, t):
    attend = cached_attend(past, jnp.zeros((1,), jnp.int32), t)
    hidden, new, _ = trunk(params, model, ids[t][None, None], t[None, None], attend=attend, carry=new)
    return new, head_logits(params, model, hidden[0, 0])

  _, logits = jax.lax.scan(step, new, jnp.arange(len(ids) - 1, dtype=jnp.int32))
  return jnp.take_along_axis(jax.nn.log_softmax(logits), ids[1:, None], axis=-1)[:, 0]


def test_a_publish_after_an_optimiser_step_reaches_the_sampler():
  """L15: checksums agree, and so do the log-probs of a fixed probe of 64 tokens, which the step has changed."""
  model, params = MOE, params_of(MOE)
  probe = Record([], 0, ids=list(prompt(65, 123)), mask=[False] + [True] * 64, logprobs=[-1.0] * 65, versions=[0] * 65)
  rows = pack([trajectory(probe)], (65,), (1,))
  learner = jax.jit(lambda params: policy_apply(model)(params, rows).logprobs[0, 1:])
  sampler = lambda: sampler_logprobs(engine.params, model, jnp.asarray(probe.ids, jnp.int32))

  engine = Engine(params, model, SMALL, seed=0)
  before = learner(params)
  np.testing.assert_allclose(sampler(), before, atol=1e-4)

  optimizer = make_optimizer(OptimizerConfig(learning_rate=0.03))
  leaves = trainable_leaves(params)
  grads = jax.jit(jax.grad(lambda leaves: -jnp.mean(learner(replace_leaves(params, leaves)))))(leaves)
  step = jax.jit(lambda network: guarded_update(network, leaves, grads, optimizer, jnp.float32(0), jnp.bool_(True)))
  network, update = step(NetworkState(params, jax.jit(optimizer.init)(leaves), jnp.int32(0)))
  assert update.applied

  engine.publish(make_publish(None)(network.params), 1)
  checksum = lambda tree: [float(np.asarray(leaf, np.float64).sum()) for leaf in jax.tree.leaves(tree)]
  assert checksum(engine.params) == checksum(network.params)
  assert all(a != b for a, b in zip(checksum(engine.params), checksum(params), strict=True))
  after = learner(network.params)
  np.testing.assert_allclose(sampler(), after, atol=1e-4)
  assert jnp.abs(after - before).max() > 0.5
  record = play(Scheduler(engine), [Record([(prompt(8, 5), 40)], rollout_id=0)])[0]
  assert_agrees(model, network.params, record)
  assert set(np.array(record.versions)[record.mask]) == {1}
