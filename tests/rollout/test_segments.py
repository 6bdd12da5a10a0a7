"""Episodes whose context is replaced on the way: one trajectory of several segments (T4)."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys.rewriting import KEY, LIMITS, Rewriting, play
from toys.rollout_fakes import STOP
from toys.sampler_fakes import answer, generate, make, request

from sao_jax.algorithm.advantage import sao_advantages, value_targets
from sao_jax.algorithm.tokens import sampled_tokens
from sao_jax.config import AlgorithmConfig, ModelConfig, SamplerConfig
from sao_jax.environments.base import StepResult
from sao_jax.episode import EnvironmentFailure, Prompt, Status
from sao_jax.learner.packing import pack, unpack
from sao_jax.models.policy import make_policy_apply
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import init_params
from sao_jax.rollout.builder import TrajectoryBuilder
from sao_jax.rollout.run_episode import run_episode
from sao_jax.rollout.serialization import trajectories_from_state, trajectories_to_state
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService


def test_every_sampled_token_is_kept_once_in_the_context_it_was_sampled_in():
  requests, trajectory = play(Rewriting(), [9, STOP])
  assert [request.new_context for request in requests] == [False, False, True, False]
  assert trajectory.token_ids.tolist() == [3, 4, 9, STOP, 8, 9, STOP, 5, 6, 7, 9, STOP, 8, 9, STOP]
  assert trajectory.action_mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1]
  assert trajectory.segment_starts.tolist() == [0, 7] and trajectory.turn_starts.tolist() == [2, 5, 10, 13]
  batch = pack([trajectory, play(Rewriting(turns=1), [9, STOP])[1]], (32,), (1,))
  assert batch.segment_ids[0].tolist() == [1] * 7 + [2] * 8 + [3] * 4 + [0] * 13
  assert batch.trajectory_ids[0].tolist() == [1] * 15 + [2] * 4 + [0] * 13
  assert batch.positions[0, :19].tolist() == [*range(7), *range(8), *range(4)]
  assert np.flatnonzero(batch.rewards[0]).tolist() == [14, 18]  # once per episode, on its last sampled token
  first, second = unpack(batch)
  assert first["token_ids"].tolist() == trajectory.token_ids.tolist() and len(second["token_ids"]) == 4


def test_segments_survive_a_checkpoint():
  _, trajectory = play(Rewriting(), [9, STOP])
  (restored,) = trajectories_from_state(*trajectories_to_state([trajectory]))
  assert restored.segment_starts.tolist() == [0, 7]
  assert pack([restored], (32,), (1,)).segment_ids.tolist() == pack([trajectory], (32,), (1,)).segment_ids.tolist()


def test_the_context_limits_a_segment_and_the_row_all_of_them():
  long = [9] * 5 + [STOP]
  _, trajectory = play(Rewriting(turns=100, fresh=range(3, 10)), long, max_turns=100)
  assert trajectory.status is Status.TRUNCATED_CONTEXT
  assert LIMITS.context_length < len(trajectory) <= LIMITS.trajectory_length
  ends = [*trajectory.segment_starts[1:], len(trajectory)]
  assert max(end - start for start, end in zip(trajectory.segment_starts, ends)) <= LIMITS.context_length
  pack([trajectory], (LIMITS.trajectory_length,), (1,))
  _, cut = play(Rewriting(turns=100, fresh=range(3, 23)), [9, STOP])  # a new context that fills the whole window
  assert cut.status is Status.TRUNCATED_CONTEXT and cut.segment_starts.tolist() == [0]


@pytest.mark.parametrize("result", [StepResult([], False, new_context=True), StepResult([3], True, 1.0, {}, True)])
def test_a_new_context_without_tokens_or_turn_is_refused(result):
  class Wrong(Rewriting):
    async def step(self, action_ids):
      return result

  with pytest.raises(EnvironmentFailure, match="a new context needs"):
    play(Wrong(), [9, STOP])


def test_a_segment_follows_an_action():
  builder = TrajectoryBuilder(KEY, 0)
  builder.append_prompt(np.array([1], np.int32))
  with pytest.raises(ValueError, match="exactly one prompt"):
    builder.append_prompt(np.array([1], np.int32))
  builder.append_action(np.array([1]), np.array([-1.0]), np.array([0]))
  builder.append_observation(np.array([1], np.int32))
  with pytest.raises(ValueError, match="exactly one prompt"):
    builder.append_prompt(np.array([1], np.int32))


@pytest.mark.parametrize("truncation", ["zero", "bootstrap"])
def test_advantages_run_over_all_segments(truncation):
  """As over one segment with the same sampled tokens and values: a later prompt is skipped like an observation."""
  config = AlgorithmConfig(truncation=truncation, gamma=0.9, critic_lambda=0.7)
  _, trajectory = play(Rewriting(), [9, STOP])
  cut = dataclasses.replace(trajectory, status=Status.TRUNCATED_TURNS)
  batch = pack([trajectory, cut], (32,), (1,))
  merged = batch.replace(segment_ids=batch.trajectory_ids)
  values = jnp.asarray(np.random.default_rng(0).normal(size=(1, 32)), jnp.float32)
  for of in (sao_advantages, value_targets):
    ours, expected = of(config, batch, values), of(config, merged, values)
    mask = sampled_tokens(batch)
    np.testing.assert_array_equal(mask, sampled_tokens(merged))
    np.testing.assert_allclose(ours[mask], expected[mask], rtol=1e-6)
  # One λ for all 8 sampled tokens: by hand, for a single reward and V = 0, Â of the first is λ^7 R.
  plain = sao_advantages(AlgorithmConfig(), pack([trajectory], (32,), (1,)), jnp.zeros((1, 32), jnp.float32))
  np.testing.assert_allclose(plain[0, 2], (1.0 - 1.0 / (1.5 * 8)) ** 7, rtol=1e-6)


def test_a_session_begins_a_new_context_in_its_slot():
  engine, scheduler = make(num_slots=2, context_length=16)
  generate(scheduler, request(7, range(8), 6, keep_slot=True))
  fresh = dataclasses.replace(request(7, (1, 2), 5, keep_slot=True), new_context=True)
  assert generate(scheduler, fresh).token_ids.tolist() == answer((1, 2), 7, 5)  # though 14 of 16 tokens were full
  assert [entry[1:4] for entry in engine.log if entry[0] == "extend"] == [(0, 0, 8), (0, 0, 2)]
  ids = [1, 2, *answer((1, 2), 7, 5)]
  assert generate(scheduler, request(7, (9,), 2)).token_ids.tolist() == answer([*ids, 9], 7, 2)


@pytest.fixture(scope="module")
def model():
  config = ModelConfig(vocab_size=32, num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=16)
  return config, init_params(param_specs(config), jax.random.key(0))


@pytest.mark.parametrize("kv_after_publish", ["keep", "reprefill"])
def test_the_learner_reads_segments_as_the_sampler_wrote_them(model, kv_after_publish):
  config, params = model
  settings = SamplerConfig(
    num_slots=2, context_length=64, prefill_buckets=(8,), window_buckets=(64,), kv_after_publish=kv_after_publish
  )

  class Model(Rewriting):
    stop_ids = tuple(range(24, 32))

  limits = dataclasses.replace(LIMITS, vocab_size=32, max_tokens_per_turn=40, context_length=64, trajectory_length=128)
  environment = Model(fresh=(3, 4))  # the very prompt of the first segment
  with SamplerService(Scheduler(Engine(params, config, settings, seed=0))) as service:
    trajectory = asyncio.run(run_episode(environment, Prompt(KEY, {}), service.generate, 5, limits, session_id=0))
  assert trajectory.status is Status.TERMINATED
  batch = pack([trajectory], (128,), (1,))
  logprobs = make_policy_apply(config, temperature=1.0, chunk=128)(params, batch).logprobs
  mask = batch.action_mask
  np.testing.assert_allclose(np.asarray(logprobs)[mask], batch.behavior_logprobs[mask], atol=1e-4)
  first, second = (trajectory.token_ids[start + 2 :].tolist() for start in trajectory.segment_starts)
  assert first[: len(second)] != second  # the same context again is sampled with other random numbers
