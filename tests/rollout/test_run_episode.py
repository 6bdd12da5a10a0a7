"""The episode driver: caps, truncation, grading, failures and time-outs, one episode at a time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import numpy as np
import pytest
from toys.rollout_fakes import STOP, VOCAB_SIZE, FakeEnvironment, FakeSampler, completion, prompt

from sao_jax.environments.base import StepResult
from sao_jax.episode import EnvironmentFailure, GraderFailure, InfrastructureFailure, Status
from sao_jax.errors import ConfigError
from sao_jax.rollout.outcomes import EnvironmentTimeout, Outcome, UnexpectedFailure, outcome_of, reason_of
from sao_jax.rollout.run_episode import EpisodeLimits, run_episode

LIMITS = EpisodeLimits(
  max_turns=9,
  max_tokens=1000,
  max_tokens_per_turn=50,
  context_length=1000,
  trajectory_length=10**6,
  vocab_size=VOCAB_SIZE,
)


def run(environment, sampler=None, timeout=5.0, **limits):
  sampler = sampler or FakeSampler()

  async def episode():
    return await run_episode(
      environment,
      prompt(3),
      sampler.generate,
      5,
      dataclasses.replace(LIMITS, **limits),
      session_id=sampler.new_session(),
      temperature=0.7,
      timeout=timeout,
    )

  return asyncio.run(episode())


def replies(*answers):
  """A sampler that gives these token lists in turn, cut at what was asked for."""
  waiting = list(answers)

  def reply(request):
    return completion(waiting.pop(0)[: request.max_tokens], stop_ids=request.stop_ids)

  return FakeSampler(reply=reply)


def test_terminated_episode():
  environment, sampler = FakeEnvironment(turns=2, observed=3), replies([7, 8, STOP], [9, STOP])
  trajectory = run(environment, sampler)
  assert trajectory.token_ids.tolist() == [6] * 4 + [7, 8, STOP] + [5] * 3 + [9, STOP]
  assert trajectory.action_mask.tolist() == [0] * 4 + [1] * 3 + [0] * 3 + [1] * 2
  assert (trajectory.status, trajectory.reward, trajectory.rollout_id) == (Status.TERMINATED, 1.0, 5)
  assert trajectory.key == prompt(3).key
  assert trajectory.info["latency"] >= trajectory.info["environment_seconds"] >= 0
  assert [action.tolist() for action in environment.actions] == [[7, 8, STOP], [9, STOP]]


def test_requests_send_only_what_is_new_and_keep_the_callers_options():
  sampler = replies([7, STOP], [8, STOP])
  run(FakeEnvironment(turns=2, observed=3), sampler, max_turns=2)
  first, second = sampler.requests
  assert list(first.new_token_ids) == [6] * 4 and list(second.new_token_ids) == [5] * 3
  assert first.session_id == second.session_id and first.rollout_id == second.rollout_id == 5
  assert first.temperature == second.temperature == 0.7
  assert first.keep_slot and not second.keep_slot  # no third turn will come


def test_stop_token_is_kept_and_a_capped_action_gets_none():
  stopped = run(FakeEnvironment(turns=1), replies([7, 8, STOP]))
  assert stopped.token_ids[4:].tolist() == [7, 8, STOP] and stopped.action_mask[4:].all()
  assert np.isfinite(stopped.behavior_logprobs[4:]).all()
  capped = run(FakeEnvironment(turns=1), replies([7, 8, 9]), max_tokens_per_turn=3)
  assert capped.token_ids[4:].tolist() == [7, 8, 9] and capped.status is Status.TRUNCATED_LENGTH


def test_several_stop_ids():
  environment = FakeEnvironment(turns=1)
  environment.stop_ids = (1, 2, 3)
  sampler = replies([7, 2])
  assert run(environment, sampler).token_ids[4:].tolist() == [7, 2]
  assert sampler.requests[0].stop_ids == (1, 2, 3)


def test_cap_respects_the_context_left():
  # Context 10, used 4 + 4 + 1: one token is left.
  sampler = replies([7, 8, 9, STOP], [9, 9, 9])
  trajectory = run(FakeEnvironment(turns=3, observed=1), sampler, context_length=10)
  assert [request.max_tokens for request in sampler.requests] == [6, 1]
  assert len(trajectory) == 10 and trajectory.status is Status.TRUNCATED_CONTEXT


@pytest.mark.parametrize("observed", [1, 2, 20])
def test_observation_that_leaves_no_room_ends_the_episode(observed):
  # Context 10, used 4 + 5: with one token left no observation fits together with an action behind it.
  environment = FakeEnvironment(turns=3, observed=observed)
  trajectory = run(environment, replies([7, 8, 9, 9, STOP]), context_length=10)
  assert trajectory.status is Status.TRUNCATED_CONTEXT and len(trajectory) == 9
  assert environment.status is Status.TRUNCATED_CONTEXT and trajectory.reward == 0.25


def test_final_observation_is_kept_where_it_fits():
  async def step():
    return StepResult([5, 5], True, 1.0)

  for context_length, length in ((10, 8), (8, 8), (7, 6)):
    trajectory = run(FakeEnvironment(faults={"step": step}), replies([7, STOP]), context_length=context_length)
    assert len(trajectory) == length and trajectory.status is Status.TERMINATED and trajectory.reward == 1.0


@pytest.mark.parametrize("budget, per_turn", [(8192, 2000), (8192, 8192), (10, 3), (9, 3), (1, 5)])
def test_token_budget_over_turns_is_exact(budget, per_turn):
  sampler = FakeSampler(reply=lambda r: completion([7] * (r.max_tokens - 1) + [STOP]))
  trajectory = run(
    FakeEnvironment(turns=10**6),
    sampler,
    max_tokens=budget,
    max_tokens_per_turn=per_turn,
    context_length=10**6,
    max_turns=10**6,
  )
  assert trajectory.num_sampled == budget and trajectory.status is Status.TRUNCATED_LENGTH


def test_turn_limit():
  environment = FakeEnvironment(turns=10)
  trajectory = run(environment, max_turns=3)
  assert trajectory.status is Status.TRUNCATED_TURNS and len(trajectory.turn_starts) == 3
  assert trajectory.reward == 0.25 and environment.status is Status.TRUNCATED_TURNS
  assert trajectory.action_mask[-1]  # the last observation has nobody to read it


def test_versions_are_those_stamped_when_sampled():
  sampler = FakeSampler(version=10)

  def reply(request):
    result = sampler.answer(request)
    sampler.version = 11  # an update lands while the reply is in flight
    return result

  sampler._reply = reply
  trajectory = run(FakeEnvironment(turns=2), sampler)
  first, second = (trajectory.policy_version[trajectory.turn_starts[i]] for i in (0, 1))
  assert (first, second) == (10, 11)
  assert set(trajectory.policy_version[: trajectory.turn_starts[1]].tolist()) == {-1, 10}


@pytest.mark.parametrize("context_length", [3, 4])
def test_prompt_that_fills_the_context_is_refused(context_length):
  with pytest.raises(ConfigError) as error:
    run(FakeEnvironment(prompt=4), context_length=context_length)
  message = str(error.value)
  assert error.value.field == "sampler.context_length"
  assert "4 tokens" in message and f"context of {context_length}" in message and "remedy" in message


def raising(error):
  async def fault():
    raise error

  return fault


def returning(value):
  async def fault():
    return value

  return fault


async def hang():
  await asyncio.sleep(3600)


async def hang_against_cancellation():
  while True:
    with contextlib.suppress(asyncio.CancelledError):
      await asyncio.sleep(3600)


async def cancel_itself():
  raise asyncio.CancelledError


INFRASTRUCTURE, ENVIRONMENT = Outcome.FAILED_INFRASTRUCTURE, Outcome.FAILED_ENVIRONMENT


@pytest.mark.parametrize("method", ["reset", "step", "on_truncated"])
@pytest.mark.parametrize(
  "fault, kind, outcome, reason",
  [
    (raising(InfrastructureFailure("fake", "gone")), InfrastructureFailure, INFRASTRUCTURE, "InfrastructureFailure"),
    (raising(GraderFailure("fake", "crashed")), GraderFailure, INFRASTRUCTURE, "GraderFailure"),
    (raising(EnvironmentFailure("fake", "broken")), EnvironmentFailure, ENVIRONMENT, "EnvironmentFailure"),
    (
      raising(ConnectionResetError()),
      InfrastructureFailure,
      INFRASTRUCTURE,
      "InfrastructureFailure(ConnectionResetError)",
    ),
    (raising(TimeoutError()), InfrastructureFailure, INFRASTRUCTURE, "InfrastructureFailure(TimeoutError)"),
    (raising(KeyError("x")), UnexpectedFailure, ENVIRONMENT, "UnexpectedFailure(KeyError)"),
    (cancel_itself, UnexpectedFailure, ENVIRONMENT, "UnexpectedFailure(RuntimeError)"),
  ],
)
def test_what_an_environment_raises_becomes_a_typed_failure(method, fault, kind, outcome, reason):
  environment = FakeEnvironment(turns=10, faults={method: fault})
  with pytest.raises(kind) as error:
    run(environment, max_turns=2)
  assert outcome_of(error.value) is outcome and reason_of(error.value) == reason
  assert error.value.environment == "fake"


@pytest.mark.parametrize("method, retryable", [("reset", True), ("step", False), ("on_truncated", False)])
@pytest.mark.parametrize("fault", [hang, hang_against_cancellation])
def test_a_hanging_environment_times_out(method, retryable, fault):
  with pytest.raises(EnvironmentTimeout, match=method) as error:
    run_abandoning(FakeEnvironment(turns=10, faults={method: fault}), timeout=0.05, max_turns=2)
  assert error.value.retryable is retryable


def run_abandoning(environment, timeout, **limits):
  """Like `run`, without waiting for tasks that refuse to be cancelled, as the rollout thread does."""
  sampler = FakeSampler()
  loop = asyncio.new_event_loop()
  try:
    limits = dataclasses.replace(LIMITS, **limits)
    session_id = sampler.new_session()
    return loop.run_until_complete(
      run_episode(environment, prompt(), sampler.generate, 0, limits, session_id=session_id, timeout=timeout)
    )
  finally:
    loop.close()


@pytest.mark.parametrize(
  "method, garbage",
  [
    ("reset", None),
    ("reset", "text"),
    ("reset", [1.5, 2.5]),
    ("reset", [VOCAB_SIZE]),
    ("reset", [-1]),
    ("step", None),
    ("step", (np.zeros(1, dtype=np.int32), True, 1.0)),
    ("step", StepResult([VOCAB_SIZE], False)),
    ("step", StepResult([], True)),
    ("step", StepResult([], True, float("nan"))),
    ("step", StepResult([], True, [1.0, 2.0])),
    ("step", StepResult([], False, float("nan"))),
    ("step", StepResult([], "yes", 1.0)),
    ("step", StepResult([], True, 1.0, info={"text": "long"})),
    ("step", StepResult([], True, 1.0, info=None)),
    ("step", StepResult([], True, 1.0, info={3: 1.0})),
    ("step", StepResult([], True, 1.0, info={"half \ud83d": 1.0})),
    ("step", StepResult([], True, 1.0, info={"large": 10**400})),
    ("step", StepResult([], True, 1.0, info={"array": np.ones(2)})),
    ("on_truncated", None),
    ("on_truncated", float("inf")),
    ("on_truncated", "0.5"),
  ],
)
def test_garbage_is_a_failure_and_never_a_reward(method, garbage):
  with pytest.raises(EnvironmentFailure):
    run(FakeEnvironment(turns=10, faults={method: returning(garbage)}), max_turns=2)


def test_a_method_that_is_not_asynchronous_is_a_failure():
  environment = FakeEnvironment()
  environment.reset = lambda prompt: [1, 2, 3]
  with pytest.raises(UnexpectedFailure):
    run(environment)


def test_what_the_sampler_raises_passes_through():
  class SamplerDied(Exception):
    pass

  def reply(request):
    raise SamplerDied

  with pytest.raises(SamplerDied):
    run(FakeEnvironment(), FakeSampler(reply=reply))


def test_an_environment_cannot_change_the_trajectory():
  environment = FakeEnvironment(turns=1)
  step = environment.step

  async def scribbling_step(action_ids):
    action_ids[:] = 0
    return await step(action_ids)

  environment.step = scribbling_step
  assert run(environment, replies([7, STOP])).token_ids[4:].tolist() == [7, STOP]


def test_numbers_of_the_last_step_are_kept():
  async def step():
    return StepResult([], True, 1.0, info={"calls": 3})

  assert run(FakeEnvironment(faults={"step": step})).info["calls"] == 3
