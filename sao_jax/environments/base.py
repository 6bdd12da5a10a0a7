"""The Environment protocol: asynchronous reset and step on token ids.

The *settings* of an environment are a frozen dataclass in the run's configuration. They make an `Environment` per
episode and list the prompts. Text becomes tokens only inside the environment; what the policy sampled is never
re-tokenised.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from sao_jax.data.tokenizer import Tokenizer
from sao_jax.episode import EnvironmentFailure, GraderFailure, InfrastructureFailure, Prompt, Status
from sao_jax.json_values import storable_text
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
  "StatedSpec",
  "StepResult",
  "check_step_result",
  "check_token_ids",
]


@dataclasses.dataclass(frozen=True)
class StepResult:
  """An environment's answer to one action.

  Attributes:
    observation: token ids [n] to append behind the action, turn markers included; may be empty.
    done: True when the episode has ended.
    reward: one finite number, required when done: the reward of the whole episode. An environment may reward earlier
      turns too; each reward then belongs to the action that it answers, and the episode's return is their sum.
    info: small facts for logs, name -> number.
    new_context: True when the observation replaces all that came before, as when a template rewrites the history. The
      policy then goes on from the observation alone. Tokens sampled before it are still trained, in the context in
      which they were sampled.
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
    reward: the return that the expert's episode earned.
    turn_rewards: float [turns], the reward of every turn, if turns before the last have any; they add up to `reward`.
  """

  token_ids: Int[np.ndarray, "T"]
  action_mask: Bool[np.ndarray, "T"]
  reward: float
  turn_rewards: Float[np.ndarray, "turns"] | None = None


@runtime_checkable
class Environment(Protocol):
  """One episode, cheap to create. Inherit from this class to get the default `on_truncated` and `close`.

  Failures that are not the agent's fault are raised as `EnvironmentFailure` or a subclass.

  >>> import asyncio
  >>> from sao_jax.environments.calculator import Calculator
  >>> from sao_jax.episode import PromptKey
  >>> settings = Calculator()
  >>> tokenizer = settings.tokenizer()
  >>> environment = settings.make(tokenizer)
  >>> prompt = Prompt(PromptKey("calculator", 0, 0), {"question": "3-12*7"})
  >>> tokenizer.decode(asyncio.run(environment.reset(prompt)))
  '<|bos|><|user|>3-12*7<|end|><|assistant|>'
  >>> result = asyncio.run(environment.step(tokenizer.encode_with_specials("<|answer|>-81<|end|>")))
  >>> result.done, result.reward
  (True, 1.0)

  Attributes:
    name: the environment's name in prompt keys, failures and metrics.
    stop_ids: token ids that end an action.
  """

  name: str
  stop_ids: tuple[int, ...]

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    """Starts the episode; returns the prompt's token ids, with exactly one begin-of-sequence token."""
    ...

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    """Answers the tokens that the policy sampled in one turn, the stop token included."""
    ...

  async def on_truncated(self, status: Status) -> float:
    """Grades an episode that was cut before its end on what there is; returns its reward.

    It is added to what earlier steps gave.
    """
    return 0.0

  async def close(self) -> None:
    """Frees the episode's resources; called once, whatever happened before."""
    return


@runtime_checkable
class EnvironmentSpec(Protocol):
  """The settings of an environment: a frozen dataclass that offers prompts and makes episodes.

  >>> from sao_jax.environments.calculator import Calculator
  >>> settings = Calculator(num_operands=2)
  >>> isinstance(settings, EnvironmentSpec)
  True
  >>> prompts = settings.prompts(settings.tokenizer(), "heldout", seed=0)
  >>> prompts[0] == prompts[0], prompts[0].key
  (True, PromptKey(environment='calculator', id=0, epoch=0))
  """

  name: str

  def tokenizer(self) -> Tokenizer:
    """Returns the tokenizer that the environment's tokens come from."""
    ...

  def make(self, tokenizer: Tokenizer) -> Environment:
    """Makes a fresh environment for one episode."""
    ...

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    """Gives random access (`len`, `[index]`) to the prompts of "train" or "heldout", the same for equal arguments."""
    ...


@runtime_checkable
class DemonstratingSpec(EnvironmentSpec, Protocol):
  """The settings of an environment with an expert, which SFT needs and RL does not."""

  def demonstration(self, prompt: Prompt, tokenizer: Tokenizer, rng: np.random.Generator) -> Demonstration:
    """Plays one imperfect expert episode on the prompt."""
    ...


@runtime_checkable
class StatedSpec(EnvironmentSpec, Protocol):
  """The settings of an environment that knows the state of its task, which nobody but `launch.oracle` needs."""

  def states(self, token_ids: Int[np.ndarray, "T"], action_mask: Bool[np.ndarray, "T"]) -> list[Hashable]:
    """Tells the state before every sampled token of an episode; the first one is all that the prompt says."""
    ...


def check_token_ids(token_ids: Any, *, environment: str, vocab_size: int, what: str) -> Int[np.ndarray, "n"]:
  """Checks token ids from an environment; returns them as int32 [n].

  Raises:
    EnvironmentFailure: when they are not a flat sequence of integers in [0, vocab_size).
  """
  try:
    array = np.asarray(token_ids)
  except (TypeError, ValueError) as error:
    raise EnvironmentFailure(environment, f"{what} is not an array of token ids: {error}") from error

  # NumPy makes an empty list an array of floats, so it passes before the dtype is looked at.
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
  """Checks an environment's answer; returns it with int32 ids, a float reward, and floats in `info`.

  Raises:
    EnvironmentFailure: for anything but a StepResult with valid ids, a boolean `done`, and an `info` that maps names to
      numbers.
    GraderFailure: for a reward that is not one finite number, and when done without any.
  """
  if not isinstance(result, StepResult):
    raise EnvironmentFailure(environment, f"step must return a StepResult, got {type(result).__name__}")
  if not isinstance(result.done, bool | np.bool_):
    raise EnvironmentFailure(environment, f"done must be a boolean, got {result.done!r:.80}")
  observation = check_token_ids(
    result.observation, environment=environment, vocab_size=vocab_size, what="the observation"
  )

  # `done`, `new_context` and `reward` must agree.
  done = bool(result.done)
  if result.new_context and (done or not len(observation)):
    raise EnvironmentFailure(environment, "a new context needs at least one token, and a turn that follows")
  reward = check_reward(result.reward, environment) if done or result.reward is not None else None
  info = _check_info(result.info, environment)
  return dataclasses.replace(result, observation=observation, done=done, reward=reward, info=info)


def _check_info(info: Any, environment: str) -> dict[str, float]:
  """Checks that `info` maps names to numbers; returns them as floats, as checkpoints and records keep them."""
  if not isinstance(info, dict):
    raise EnvironmentFailure(environment, f"info must map names to numbers, got {info!r:.80}")
  for name, value in info.items():
    if not isinstance(name, str) or not storable_text(name):
      raise EnvironmentFailure(environment, f"info has the key {name!r:.80}, which is no name")
    if not isinstance(value, numbers.Real):
      raise EnvironmentFailure(environment, f"info[{name!r}] must be a number, got {value!r:.80}")
  try:
    return {str(name): float(value) for name, value in info.items()}
  except OverflowError as error:
    raise EnvironmentFailure(environment, f"info holds a number that no float can: {error}") from error
