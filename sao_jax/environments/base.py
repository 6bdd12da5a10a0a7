"""The Environment protocol: asynchronous reset and step on token ids.

The *settings* of an environment are a frozen dataclass in the run's configuration. They make an `Environment` per
episode and list the prompts. Text becomes tokens only inside the environment; what the policy sampled is never
re-tokenised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from sao_jax.data.tokenizer import Tokenizer
from sao_jax.episode import EnvironmentFailure, GraderFailure, InfrastructureFailure, Prompt, Status
from sao_jax.rewards.scalar import check_reward

__all__ = [
  "DemonstratingSpec",
  "Demonstration",
  "Environment",
  "EnvironmentFailure",
  "EnvironmentSpec",
  "GraderFailure",
  "InfrastructureFailure",
  "Prompt",
  "StepResult",
  "check_step_result",
  "check_token_ids",
]


@dataclasses.dataclass(frozen=True)
class StepResult:
  """What an environment answers to one action.

  Attributes:
    observation: token ids [n] to append behind the action, turn markers included; may be empty.
    done: whether the episode has ended.
    reward: the reward of the whole episode, one finite number; required when done, None otherwise.
    info: small facts for logs, name -> number.
    new_context: the observation takes the place of all that came before, as when a template rewrites the history: the
      policy goes on from it alone. What was sampled is still trained, in the context in which it was sampled.
  """

  observation: Int[np.ndarray, "n"] | Sequence[int]
  done: bool
  reward: float | None = None
  info: dict[str, float] = dataclasses.field(default_factory=dict)
  new_context: bool = False


@dataclasses.dataclass(frozen=True)
class Demonstration:
  """One expert episode to imitate; experts here make mistakes on purpose, so that RL has something to improve.

  Attributes:
    token_ids: int32 [T], prompt, actions and observations exactly as an episode would hold them.
    action_mask: bool [T], True on the expert's tokens, its end-of-turn tokens included.
    reward: what the expert's episode earned.
  """

  token_ids: Int[np.ndarray, "T"]
  action_mask: Bool[np.ndarray, "T"]
  reward: float


@runtime_checkable
class Environment(Protocol):
  """One episode at a time; cheap to create. Inherit from it to get the default `on_truncated` and `close`.

  Failures that are not the agent's fault are raised as `EnvironmentFailure` or a subclass.

  Attributes:
    name: names the environment in prompt keys, failures and metrics.
    stop_ids: token ids that end an action.
  """

  name: str
  stop_ids: tuple[int, ...]

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    """Starts an episode; returns the prompt's token ids, with exactly one begin-of-sequence token."""
    ...

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    """Takes the tokens that the policy sampled in one turn, the stop token included."""
    ...

  async def on_truncated(self, status: Status) -> float:
    """Reward of an episode that was cut before its end, graded on what there is."""
    return 0.0

  async def close(self) -> None:
    """Frees what the episode holds; called once, whatever happened before."""
    return


@runtime_checkable
class EnvironmentSpec(Protocol):
  """The settings of an environment."""

  name: str

  def tokenizer(self) -> Tokenizer:
    """The tokenizer that the environment's tokens come from."""
    ...

  def make(self, tokenizer: Tokenizer) -> Environment:
    """A fresh environment for one episode."""
    ...

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    """Random access to the prompts of "train" or "heldout" (`len`, `[index]`); equal arguments, equal prompts."""
    ...


@runtime_checkable
class DemonstratingSpec(EnvironmentSpec, Protocol):
  """The settings of an environment with an expert; SFT needs one, RL does not."""

  def demonstration(self, prompt: Prompt, tokenizer: Tokenizer, rng: np.random.Generator) -> Demonstration:
    """One imperfect expert episode on the prompt."""
    ...


def check_token_ids(token_ids: Any, *, environment: str, vocab_size: int, what: str) -> Int[np.ndarray, "n"]:
  """Returns the ids as int32 [n].

  Raises:
    EnvironmentFailure: when they are not a flat sequence of integers in [0, vocab_size).
  """
  try:
    array = np.asarray(token_ids)
  except (TypeError, ValueError) as error:
    raise EnvironmentFailure(environment, f"{what} is not an array of token ids: {error}") from error
  if array.size == 0 and array.ndim == 1:
    return np.zeros(0, dtype=np.int32)
  if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
    raise EnvironmentFailure(
      environment, f"{what} must be integers of shape [n], got {array.dtype} of shape {array.shape}"
    )
  low, high = int(array.min()), int(array.max())
  if low < 0 or high >= vocab_size:
    raise EnvironmentFailure(environment, f"{what} has ids from {low} to {high}, outside [0, {vocab_size})")
  return array.astype(np.int32)


def check_step_result(result: Any, *, environment: str, vocab_size: int) -> StepResult:
  """Returns the result with int32 ids and a float reward.

  Raises:
    EnvironmentFailure: for anything but a StepResult with valid ids, a boolean `done`, and a reward only when done.
    GraderFailure: when done without one finite reward.
  """
  if not isinstance(result, StepResult):
    raise EnvironmentFailure(environment, f"step must return a StepResult, got {type(result).__name__}")
  if not isinstance(result.done, bool | np.bool_):
    raise EnvironmentFailure(environment, f"done must be a boolean, got {result.done!r:.80}")
  observation = check_token_ids(
    result.observation, environment=environment, vocab_size=vocab_size, what="the observation"
  )
  done = bool(result.done)
  if result.new_context and (done or not len(observation)):
    raise EnvironmentFailure(environment, "a new context needs at least one token, and a turn that follows")
  if not done and result.reward is not None:
    raise EnvironmentFailure(environment, f"a reward ({result.reward!r:.80}) before the episode is done")
  reward = check_reward(result.reward, environment) if done else None
  return dataclasses.replace(result, observation=observation, done=done, reward=reward)
