"""Rollouts in flight that are certain to be dropped for their age are cancelled; nothing else is."""

from __future__ import annotations

import asyncio
import threading
import time

import jax
import pytest
from toys.rollout_fakes import (
  FakeEnvironment,
  FakePrompts,
  FakeSampler,
  Running,
  completion,
  make_buffer,
  make_loop,
  make_trajectory,
  submit,
)

from sao_jax.config import ModelConfig, SamplerConfig
from sao_jax.environments.base import StepResult
from sao_jax.episode import InfrastructureFailure
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import init_params
from sao_jax.rollout.outcomes import Outcome, check_identity
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.requests import GenerateRequest
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService

IN_FLIGHT = "dropped_stale/in flight, older than 4 versions"


def test_the_first_version_at_which_it_is_certain():
  """A rollout of version 0 with tau = 4 may be used by the step that updates version 4, and by none after that."""
  now = 10.0
  buffer = make_buffer(batch_size=1, eta=9, max_staleness=4, clock=lambda: now)
  cancelled = []
  buffer.ledger.on_cancel = cancelled.append
  assert submit(buffer.ledger, 0) and submit(buffer.ledger, 1) and submit(buffer.ledger, 2)
  for rollout_id in (0, 1, 2):
    buffer.note_oldest(rollout_id, None)
  buffer.note_oldest(0, 0)
  buffer.note_oldest(1, 1)  # 2 has no token yet: it has no age

  now = 70.0
  buffer.set_version(4)
  assert not cancelled
  buffer.set_version(5)
  assert cancelled == [0]
  counters = buffer.ledger.counters()
  check_identity(counters)
  assert counters[IN_FLIGHT] == counters["dropped_stale"] == 1 and buffer.ledger.capacity == 10 - 2

  # It counts as generated, as far as it went, or the means would hide that the long ones are missing.
  summary = buffer.statistics.summary()
  assert (summary["generated"], summary["cancelled"], summary["mean_generated_latency"]) == (1, 1, 60.0)

  # It may have finished meanwhile: it is counted once.
  assert buffer.put(make_trajectory(0, version=0)) is False
  assert buffer.statistics.summary()["generated"] == 1 and buffer.ledger.counters() == counters


def test_a_version_that_is_known_late_cancels_at_once_and_a_new_attempt_has_no_age():
  buffer = make_buffer(batch_size=1, eta=9, max_staleness=4)
  assert submit(buffer.ledger, 0) and submit(buffer.ledger, 1)
  buffer.note_oldest(0, 0)
  buffer.note_oldest(0, None)  # it is tried again
  buffer.set_version(6)
  assert buffer.ledger.counters()["in_flight"] == 2
  buffer.note_oldest(0, 6)
  buffer.note_oldest(1, 1)
  buffer.note_oldest(7, 1)  # unknown here: it has ended
  assert buffer.ledger.in_flight().keys() == {0} and buffer.ledger.counters()[IN_FLIGHT] == 1


@pytest.mark.parametrize("limits", [{"staleness": "mask", "max_staleness": 4}, {"max_staleness": -1}])
def test_nothing_is_cancelled_while_it_may_yet_be_used(limits):
  buffer = make_buffer(batch_size=1, eta=9, **limits)
  assert submit(buffer.ledger, 0)
  buffer.note_oldest(0, 0)
  buffer.set_version(100)
  assert buffer.ledger.counters()["in_flight"] == 1


def test_a_doomed_rollout_ends_its_group():
  buffer = make_buffer(batch_size=3, eta=1, group_size=3, max_staleness=4)
  cancelled = []
  buffer.ledger.on_cancel = cancelled.append
  assert submit(buffer.ledger, 0, 1, 2)
  buffer.put(make_trajectory(0, version=3))
  buffer.note_oldest(1, 0)
  buffer.note_oldest(2, 5)
  buffer.set_version(5)
  counters = buffer.ledger.counters()
  check_identity(counters)
  assert cancelled == [1, 2] and counters["dropped_stale"] == 3 and counters[IN_FLIGHT] == 1
  assert counters["dropped_stale/group/in flight, older than 4 versions"] == 2


def test_a_live_loop_frees_place_capacity_and_session_of_a_rollout_that_waits_for_its_environment():
  """The trainer publishes; the environment of rollout 0 never answers its first action."""
  closed = threading.Event()

  class Slow(FakeEnvironment):
    async def step(self, action_ids):
      if self.prompt.key.id == 0:
        await asyncio.sleep(3600)
      return await super().step(action_ids)

    async def close(self):
      if self.prompt.key.id == 0:
        closed.set()

  sampler = FakeSampler()
  with Running(make_loop(Slow, sampler, slots=1, max_staleness=4, environment_timeout=3600.0)) as loop:
    deadline = time.monotonic() + 20
    while loop.ledger.in_flight().get(0) is None or loop.ledger.in_flight()[0].oldest is None:
      assert time.monotonic() < deadline
      time.sleep(0.001)
    loop.on_version(4)
    assert loop.stats()["dropped_stale"] == 0
    sampler.version = 5
    loop.on_version(5)

    # The only place is free again: the next rollouts fill a batch.
    assert [t.rollout_id for t in loop.buffer.take(4, 5, timeout=20)] == [1, 2, 3, 4]
    assert loop.stats()[IN_FLIGHT] == 1 and closed.wait(20)
  assert not sampler.open


def test_a_rollout_that_is_doomed_when_its_first_turn_is_answered_may_report_something_else_in_the_same_breath():
  """Its answer is no evidence at all: it has had its outcome by then, and the loop goes on."""
  sampler = FakeSampler(reply=lambda request: completion([7, 2], logprobs=[-0.5, float("nan")]))
  loop = make_loop(sampler=sampler, prompts=FakePrompts(1), slots=1, max_staleness=4)
  loop.buffer.set_version(5)
  with Running(loop):
    assert loop.buffer.wait_for(lambda: loop.ledger.counters()["dropped_stale"] == 1, timeout=20)
    deadline = time.monotonic() + 20
    while sampler.open or loop._tasks:  # its task has ended
      assert time.monotonic() < deadline
      time.sleep(0.001)
    loop.check()
  assert loop.ledger.counters()[IN_FLIGHT] == 1 and loop.ledger.counters()["filtered"] == 0


def test_a_retry_starts_without_an_age():
  """The first attempt samples at version 0 and fails at version 5; the second one has all the time there is."""
  attempts = []

  class Flaky(FakeEnvironment):
    async def step(self, action_ids):
      if not attempts:
        attempts.append(loop.ledger.in_flight()[0].oldest)
        sampler.version = 5
        raise InfrastructureFailure("fake", "gone")
      if len(attempts) == 1:
        attempts.append(loop.ledger.in_flight()[0].oldest)
      return StepResult([], True, 1.0)

  sampler = FakeSampler()
  loop = make_loop(Flaky, sampler, slots=1, max_staleness=4, environment_retries=1)
  with Running(loop):
    assert loop.buffer.wait_for(lambda: len(loop.buffer) > 0, timeout=20)
    loop.on_version(5)
  assert attempts == [0, 5] and loop.ledger.counters()[Outcome.DROPPED_STALE.value] == 0


def test_the_sampler_reports_a_version_while_a_turn_is_being_sampled():
  model = ModelConfig(vocab_size=8, num_layers=1, d_model=4, num_heads=1, num_kv_heads=1, head_dim=4, d_ff=4)
  config = SamplerConfig(num_slots=1, context_length=16, decode_steps=2, decode_batch=1, prefill_buckets=(16,))
  params = init_params(param_specs(model), jax.random.key(0))
  reported, published = [], []

  def on_sampled(version):
    if not reported:
      service.publish(params, 3)
    reported.append(version)
    published.append(service.version)

  with SamplerService(Scheduler(Engine(params, model, config, seed=0))) as service:
    request = GenerateRequest(service.new_session(), 0, new_token_ids=(1, 2), max_tokens=9, on_sampled=on_sampled)
    completion = service.generate_sync(request, timeout=60)
  assert reported == sorted(reported) and set(reported) == set(completion.policy_versions.tolist()) == {0, 3}
