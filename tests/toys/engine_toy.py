"""Sessions played on a real engine, and what the learner says of the same tokens."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.config import ModelConfig, SamplerConfig
from sao_jax.models.policy import make_policy_apply
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import init_params
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.requests import GenerateRequest
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.types import TrajectoryBatch

DENSE = ModelConfig(vocab_size=61, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48, initializer_range=0.3)


MOE = dataclasses.replace(DENSE, num_experts=4, num_experts_per_token=2, d_ff_expert=16, num_dense_layers=1)


TIED = dataclasses.replace(DENSE, tie_embeddings=True, qk_norm=False, num_layers=1)


SMALL = SamplerConfig(
  num_slots=4, context_length=48, decode_steps=4, prefill_buckets=(8,), prefill_batch=1, window_buckets=(48,)
)


REPREFILL = dataclasses.replace(SMALL, kv_after_publish="reprefill")


@functools.cache
def params_of(model, seed=0):
  return init_params(param_specs(model), jax.random.key(seed))


@dataclasses.dataclass
class Record:
  """One session as its caller sees it."""

  turns: list[tuple[tuple[int, ...], int]]  # new tokens, max_tokens
  rollout_id: int
  temperature: float = 1.0
  stop_ids: tuple[int, ...] = ()
  ids: list[int] = dataclasses.field(default_factory=list)
  mask: list[bool] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  experts: list[np.ndarray] = dataclasses.field(default_factory=list)  # of every turn

  def append(self, ids, sampled, logprobs=None, versions=None):
    self.ids += [int(i) for i in ids]
    self.mask += [sampled] * len(ids)
    self.logprobs += [float("nan")] * len(ids) if logprobs is None else list(logprobs)
    self.versions += [-1] * len(ids) if versions is None else list(versions)


def play(scheduler, records, on_tick=lambda tick: None, delay=0):
  """Runs all sessions to their end, side by side; an environment takes `delay` ticks."""
  results = []

  def start(index, turn):
    record = records[index]
    new, max_tokens = record.turns[turn]
    record.append(new, False)
    last = turn == len(record.turns) - 1
    request = GenerateRequest(
      index, record.rollout_id, new, max_tokens, record.stop_ids, record.temperature, keep_slot=not last
    )
    scheduler.submit(request, lambda done: results.append((index, turn, done)))

  due = [(0, index, 0) for index in range(len(records))]  # tick, session, turn
  tick = 0
  while due or results or scheduler.stats()["queued_turns"] + scheduler.stats()["decoding_turns"]:
    for item in [item for item in due if item[0] <= tick]:
      due.remove(item)
      start(*item[1:])
    scheduler.tick()
    on_tick(tick)
    tick += 1
    for index, turn, done in results:
      if isinstance(done, BaseException):
        raise done
      records[index].append(done.token_ids, True, done.logprobs, done.policy_versions)
      records[index].experts.append(done.routed_experts)
      if turn + 1 < len(records[index].turns):
        due.append((tick + delay, index, turn + 1))
    results.clear()
  return records


def prompt(length, seed):
  return tuple(np.random.default_rng(seed).integers(0, 61, length).tolist())


@functools.cache
def policy_apply(model, temperature=1.0):
  return jax.jit(make_policy_apply(model, temperature=temperature))


def learner_logprobs(model, params, record):
  """Log-probs [T] of a session by the learner, in a row of 48 tokens."""
  length = len(record.ids)
  pad = lambda x, fill, dtype: jnp.asarray(np.pad(np.asarray(x, dtype), (0, 48 - length), constant_values=fill))[None]
  batch = TrajectoryBatch(
    token_ids=pad(record.ids, 0, np.int32),
    segment_ids=pad([1] * length, 0, np.int32),
    trajectory_ids=pad([1] * length, 0, np.int32),
    positions=pad(range(length), 0, np.int32),
    action_mask=pad(record.mask, False, bool),
    loss_mask=pad(record.mask, False, bool),
    behavior_logprobs=pad(record.logprobs, np.nan, np.float32),
    policy_version=pad(record.versions, -1, np.int32),
    rewards=jnp.zeros((1, 48), jnp.float32),
    truncated=jnp.zeros((1, 48), jnp.bool_),
  )
  return np.asarray(policy_apply(model, record.temperature)(params, batch).logprobs)[0, :length]


def assert_agrees(model, params, record, tolerance=1e-4, where=None):
  mask = np.array(record.mask) if where is None else np.array(record.mask) & where
  assert mask.any()
  expected = learner_logprobs(model, params, record)
  np.testing.assert_allclose(np.array(record.logprobs)[mask], expected[mask], atol=tolerance)


def scheduler_of(model, config=SMALL, params=None, **kwargs):
  return Scheduler(Engine(params_of(model) if params is None else params, model, config, seed=0), **kwargs)


def single_turns(count=6):
  return [Record([(prompt(3 + 4 * i, i), 7 + 2 * (i % 3))], rollout_id=100 + i) for i in range(count)]


def multi_turns(count=5):
  return [
    Record([(prompt(2 + i, i), 4), (prompt(3, 50 + i), 5), ((), 2), (prompt(11, 70 + i), 3)], rollout_id=i)
    for i in range(count)
  ]
