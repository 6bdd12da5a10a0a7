"""The episode driver: one prompt to one trajectory, through an environment and a sampler that it only calls.

Both are arguments and speak token ids, so neither has to live in this process.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np

from sao_jax.config import RolloutConfig
from sao_jax.environments.base import Environment, StepResult, check_step_result, check_token_ids
from sao_jax.episode import EnvironmentFailure, Prompt, Status, Trajectory
from sao_jax.rewards.scalar import check_reward
from sao_jax.rollout.builder import TrajectoryBuilder
from sao_jax.rollout.calls import call_environment, failures_of
from sao_jax.rollout.evidence import check_completion, check_routed_experts
from sao_jax.rollout.loop_clock import LoopClock
from sao_jax.rollout.outcomes import PromptEmpty, PromptTooLong
from sao_jax.sampler.requests import Completion, GenerateRequest
from sao_jax.sampler.state import MAX_STOP_IDS

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
  """Limits that cut an episode; all but `max_turns` in tokens.

  Attributes:
    max_turns: actions per episode.
    max_tokens: sampled tokens per episode.
    max_tokens_per_turn: sampled tokens per action.
    context_length: prompt + actions + observations, of one segment.
    trajectory_length: all segments of an episode together.
    vocab_size: an environment's ids must lie below it.
  """

  max_turns: int
  max_tokens: int
  max_tokens_per_turn: int
  context_length: int
  trajectory_length: int
  vocab_size: int

  @classmethod
  def of(cls, config: RolloutConfig, *, context_length: int, vocab_size: int) -> EpisodeLimits:
    """The limits that a rollout configuration sets, in a context of `context_length` tokens."""
    return cls(
      max_turns=config.max_turns,
      max_tokens=config.max_tokens,
      max_tokens_per_turn=config.max_tokens_per_turn,
      context_length=context_length,
      trajectory_length=config.max_trajectory_tokens or sys.maxsize,
      vocab_size=vocab_size,
    )

  def room(self, builder: TrajectoryBuilder, context_length: int | None = None) -> int:
    """Tokens that still fit, by default behind the segment under way."""
    context = builder.context_length if context_length is None else context_length
    return min(self.context_length - context, self.trajectory_length - len(builder))

  def turn_cap(self, builder: TrajectoryBuilder) -> int:
    """Tokens that the next action may have: whatever is least of turn cap, budget left and context left."""
    return min(self.max_tokens_per_turn, self.max_tokens - builder.num_sampled, self.room(builder))

  def status_of_cut_action(self, builder: TrajectoryBuilder, cap: int) -> Status:
    """Why an action ended without a stop token: context, unless the turn's cap or the budget was as tight."""
    tight = cap == self.max_tokens_per_turn or builder.num_sampled >= self.max_tokens
    full = self.room(builder) <= 0
    return Status.TRUNCATED_CONTEXT if full and not tight else Status.TRUNCATED_LENGTH

  def status_before_next_turn(self, builder: TrajectoryBuilder, result: StepResult) -> Status | None:
    """Why no further action fits behind the observation, or None when one does."""
    if builder.num_turns >= self.max_turns:
      return Status.TRUNCATED_TURNS
    if builder.num_sampled >= self.max_tokens:
      return Status.TRUNCATED_LENGTH
    if len(result.observation) >= self.room(builder, 0 if result.new_context else None):
      return Status.TRUNCATED_CONTEXT
    return None


async def run_episode(
  environment: Environment,
  prompt: Prompt,
  generate: Callable[[GenerateRequest], Awaitable[Completion]],
  rollout_id: int,
  limits: EpisodeLimits,
  *,
  session_id: int,
  sample: int = 0,
  temperature: float = 1.0,
  timeout: float = 30.0,
  clock: LoopClock | None = None,
) -> Trajectory:
  """Runs one episode.

  An episode that is cut (budget, turns, context) is graded by `environment.on_truncated` and returned like any other.
  Rewards that its steps gave before are kept, and the grade is added to them.
  `info` of the result holds "latency" and "environment_seconds" (seconds), and the numbers of the last step's info.

  Args:
    environment: used for this episode only; the caller closes it.
    prompt: the task.
    generate: awaitable sampling of one action; its exceptions pass through unchanged.
    rollout_id: number of the rollout.
    limits: what cuts the episode.
    session_id: the sampler's session; the caller opens and releases it.
    sample: its number among the rollouts of the prompt.
    temperature: sampling temperature.
    timeout: seconds for one call of the environment.
    clock: beats in the running event loop; None makes one.

  Raises:
    EnvironmentFailure: the environment failed, timed out or returned garbage.
    BadEvidence: the sampler returned an action that cannot be trained on.
    BadPrompt: nobody can attempt the prompt: no token fits behind it, it is empty, or the environment says so.
  """
  # Pose the task.
  began = time.monotonic()
  caller = _EnvironmentCaller(environment, prompt, timeout, limits.vocab_size, clock or LoopClock().start())
  prompt_ids = await caller.reset(prompt)
  if len(prompt_ids) >= limits.context_length:
    raise PromptTooLong(len(prompt_ids), limits.context_length, str(tuple(prompt.key)))
  builder = TrajectoryBuilder(prompt.key, rollout_id, sample)
  builder.append_prompt(prompt_ids)

  info: dict[str, float] = {}
  new_ids, new_context, reward, status = prompt_ids, False, None, None
  while status is None:
    # The policy acts.
    cap = limits.turn_cap(builder)
    stop_ids = caller.stop_ids()
    request = GenerateRequest(
      session_id=session_id,
      rollout_id=rollout_id,
      new_token_ids=new_ids,
      max_tokens=cap,
      stop_ids=stop_ids,
      temperature=temperature,
      keep_slot=builder.num_turns + 1 < limits.max_turns,
      new_context=new_context,
    )
    completion = await generate(request)

    # What it was recorded with is checked before anything is built on it.
    action_ids, logprobs, versions = check_completion(completion, cap, stop_ids)
    num_read = builder.num_unrouted + len(action_ids) - 1
    routed_experts = check_routed_experts(completion.routed_experts, num_read, builder.routed_shape)
    builder.append_action(action_ids, logprobs, versions, routed_experts)
    if completion.finish_reason != "stop":
      status = limits.status_of_cut_action(builder, cap)
      break

    # The environment answers.
    result = await caller.step(action_ids)
    info |= result.info
    new_ids, new_context = result.observation, result.new_context
    if result.done:
      status, reward = Status.TERMINATED, result.reward
    else:
      builder.add_reward(result.reward or 0.0)
      status = limits.status_before_next_turn(builder, result)

    # Its answer is kept where an action follows, or where the last one still fits.
    if status is None and new_context:
      builder.append_prompt(new_ids)
    elif status is None or (result.done and len(new_ids) <= limits.room(builder)):
      builder.append_observation(new_ids)

  # An episode that was cut is graded as it stands.
  if reward is None:
    reward = await caller.on_truncated(status)
  info |= {"latency": time.monotonic() - began, "environment_seconds": caller.seconds}
  return builder.build(reward, status, info)


def check_stop_ids(stop_ids: Any, *, environment: str, vocab_size: int) -> tuple[int, ...]:
  """Checks the ids that end an action; returns them as plain integers.

  Raises:
    EnvironmentFailure: for anything but a few integers in [0, vocab_size).
  """
  ids = check_token_ids(tuple(stop_ids), environment=environment, vocab_size=vocab_size, what="stop_ids")
  if len(ids) > MAX_STOP_IDS:
    raise EnvironmentFailure(environment, f"stop_ids has {len(ids)} ids, more than {MAX_STOP_IDS}")
  return tuple(ids.tolist())


class _EnvironmentCaller:
  """Calls an environment with a time-out, and turns whatever goes wrong into an `EnvironmentFailure`."""

  def __init__(self, environment: Environment, prompt: Prompt, timeout: float, vocab_size: int, clock: LoopClock):
    self._environment, self._timeout, self._vocab_size, self._clock = environment, timeout, vocab_size, clock
    self._name = prompt.key.environment
    self.seconds = 0.0

  async def reset(self, prompt: Prompt) -> np.ndarray:
    # Nothing has been sampled yet, so a fresh instance may try again, whatever hung.
    # A copy: what an environment keeps in its prompt must not reach a checkpoint, nor another attempt.
    ids = await self._call("reset", lambda: self._environment.reset(prompt.copy()), retryable=True)
    with failures_of(self._name, "reading the prompt"):
      ids = check_token_ids(ids, environment=self._name, vocab_size=self._vocab_size, what="the prompt")
    if not len(ids):
      raise PromptEmpty(self._name, str(tuple(prompt.key)))
    return ids

  def stop_ids(self) -> tuple[int, ...]:
    with failures_of(self._name, "reading stop_ids"):
      return check_stop_ids(self._environment.stop_ids, environment=self._name, vocab_size=self._vocab_size)

  async def step(self, action_ids: np.ndarray) -> StepResult:
    # A copy: what an environment does to its argument must not reach the trajectory.
    result = await self._call("step", lambda: self._environment.step(action_ids.copy()))
    with failures_of(self._name, "reading the answer of step"):
      return check_step_result(result, environment=self._name, vocab_size=self._vocab_size)

  async def on_truncated(self, status: Status) -> float:
    reward = await self._call("on_truncated", lambda: self._environment.on_truncated(status))
    with failures_of(self._name, "reading the reward of on_truncated"):
      return check_reward(reward, self._name)

  async def _call(self, method: str, call: Callable[[], Awaitable[T]], *, retryable: bool = False) -> T:
    began = time.monotonic()
    try:
      return await call_environment(call, self._name, method, self._timeout, self._clock, retryable=retryable)
    finally:
      self.seconds += time.monotonic() - began
