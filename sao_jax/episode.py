"""One episode on the host: its prompt, its end, its failures, and the trajectory that it leaves. Numpy only."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import enum
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from sao_jax.errors import ConfigError

# True while prompts are posed before work begins, only to see if anybody could attempt them.
only_looked_at: contextvars.ContextVar[bool] = contextvars.ContextVar("only_looked_at", default=False)


class PromptKey(NamedTuple):
  """Names one prompt for ever: its environment, the number of the example there, and the pass over the data."""

  environment: str
  id: int
  epoch: int


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One task to attempt.

  Attributes:
    key: its name, for ever; `source[key.id]` gives the prompt back (of epoch 0).
    data: what the environment needs to pose and grade it; JSON values only.
  """

  key: PromptKey
  data: dict[str, Any]

  def copy(self) -> Prompt:
    """Returns an equal prompt with data of its own, for whoever may change it."""
    return dataclasses.replace(self, data=copy.deepcopy(self.data))


class Status(enum.Enum):
  """Ends of an episode. Only TERMINATED has a true end state, V(s_n) = 0."""

  TERMINATED = "terminated"
  TRUNCATED_LENGTH = "truncated(length)"  # the per-episode budget of sampled tokens ran out
  TRUNCATED_TURNS = "truncated(turns)"  # the turn limit was reached
  TRUNCATED_CONTEXT = "truncated(context)"  # prompt + actions + observations filled the context

  @property
  def truncated(self) -> bool:
    return self is not Status.TERMINATED


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One finished episode on the host. All arrays have length T = prompt + actions + observations.

  Attributes:
    token_ids: int32 [T], exactly the ids that were sampled or appended; text is never re-tokenised.
    action_mask: bool [T], True on tokens the policy sampled (the sampled stop token included).
    behavior_logprobs: float32 [T], log-probability under the sampler when the token was sampled; NaN elsewhere.
    policy_version: int32 [T], version of the weights that sampled the token; -1 elsewhere.
    turn_starts: int32 [turns], index of the first sampled token of every turn.
    reward: the episode's return, one finite number: the sum of its rewards.
    status: how the episode ended.
    key: the prompt it came from.
    rollout_id: number of the rollout in this run; with the run seed it determines all random keys.
    info: small host-side facts for logs (latency in seconds, environment name, ...).
    loss_mask: bool [T], the sampled tokens that are trained on; None: all of them.
    segment_starts: int32 [segments], index of the first token of every segment; None: one segment. A segment has a
      prompt of its own and does not see the tokens before it; reward, n and advantages belong to them all together.
    routed_experts: int16 [T, L, k], the experts that the sampler used for the token as it read it, in each of the L
      layers with experts; -1 where it never did, as for the last token. None: not kept.
    sample: its number among the rollouts of its prompt, 0 ... `rollout.group_size` - 1.
    baseline: what its return is compared with, by an estimator that wants it; None: not known yet.
    turn_rewards: float64 [turns], the reward of every turn, adding up to `reward`; None: the last one has all of it.

  >>> trajectory = Trajectory(
  ...   token_ids=np.array([5, 6, 8, 9, 7], np.int32),
  ...   action_mask=np.array([False, True, False, False, True]),
  ...   behavior_logprobs=np.array([np.nan, -0.5, np.nan, np.nan, -0.1], np.float32),
  ...   policy_version=np.array([-1, 3, -1, -1, 4], np.int32),
  ...   turn_starts=np.array([1, 4], np.int32),
  ...   reward=1.0,
  ...   status=Status.TERMINATED,
  ...   key=PromptKey("calculator", 17, 0),
  ...   rollout_id=42,
  ... )
  >>> len(trajectory), trajectory.num_sampled, trajectory.oldest_version
  (5, 2, 3)
  """

  token_ids: Int[np.ndarray, "T"]
  action_mask: Bool[np.ndarray, "T"]
  behavior_logprobs: Float[np.ndarray, "T"]
  policy_version: Int[np.ndarray, "T"]
  turn_starts: Int[np.ndarray, "turns"]
  reward: float
  status: Status
  key: PromptKey
  rollout_id: int
  info: dict[str, float] = dataclasses.field(default_factory=dict)
  loss_mask: Bool[np.ndarray, "T"] | None = None
  segment_starts: Int[np.ndarray, "segments"] | None = None
  routed_experts: Int[np.ndarray, "T L k"] | None = None
  sample: int = 0
  turn_rewards: Float[np.ndarray, "turns"] | None = None
  baseline: float | None = None

  def __len__(self) -> int:
    return len(self.token_ids)

  @property
  def group(self) -> int:
    """Number of its group, the rollouts of one prompt: the rollout id of sample 0, which no other group has."""
    return self.rollout_id - self.sample

  @property
  def begins(self) -> Bool[np.ndarray, "T"]:
    """Marks the first token of every segment."""
    begins = np.zeros(len(self), np.bool_)
    begins[[0] if self.segment_starts is None else self.segment_starts] = True
    return begins

  @property
  def longest_segment(self) -> int:
    """Number of tokens of its longest segment."""
    return int(np.diff(np.append(np.flatnonzero(self.begins), len(self))).max(initial=0))

  @property
  def token_rewards(self) -> Float[np.ndarray, "T"]:
    """The reward of each turn on its last sampled token, which an observation may follow; 0 elsewhere. fp32."""
    rewards = np.zeros(len(self), np.float32)
    sampled = np.flatnonzero(self.action_mask)
    if self.turn_rewards is None:
      rewards[sampled[-1:]] = self.reward
      return rewards

    # The last sampled token before the next turn begins.
    next_starts = np.append(self.turn_starts[1:], len(self))
    rewards[sampled[np.searchsorted(sampled, next_starts) - 1]] = self.turn_rewards
    return rewards

  @property
  def num_sampled(self) -> int:
    """Number n of sampled tokens."""
    return int(self.action_mask.sum())

  @property
  def trained(self) -> Bool[np.ndarray, "T"]:
    """Marks the sampled tokens that are trained on."""
    return self.action_mask if self.loss_mask is None else self.loss_mask

  @property
  def num_trained(self) -> int:
    """Number of sampled tokens that are trained on."""
    return int(self.trained.sum())

  @property
  def oldest_version(self) -> int:
    """Version of the oldest sampled token; staleness is measured on it. -1 without sampled tokens."""
    return int(self.policy_version[self.action_mask].min()) if self.action_mask.any() else -1


class BadPrompt(ConfigError):
  """One prompt that nobody can attempt: it is skipped and counted, and the run goes on with the next one.

  A source of prompts raises it for an item that is damaged, an environment for one that it cannot pose.

  Attributes:
    reason: a short fixed name, under which it is counted.
  """

  def __init__(self, field: str, problem: str, remedy: str, *, reason: str = "prompt_bad"):
    self.reason = reason
    super().__init__(field, problem, remedy)


class EnvironmentFailure(Exception):
  """The environment could not produce or grade the episode; carries the environment's name.

  Attributes:
    environment: name of the environment.
    problem: what happened, one sentence.
    retryable: True if the same call on a fresh instance may succeed.
  """

  retryable_by_default = False

  def __init__(self, environment: str, problem: str, *, retryable: bool | None = None):
    self.environment, self.problem = environment, problem
    self.retryable = self.retryable_by_default if retryable is None else retryable
    super().__init__(f"environment {environment!r}: {problem}")


class InfrastructureFailure(EnvironmentFailure):
  """A sandbox was not created, a server is gone, a disk is full: worth another try."""

  retryable_by_default = True


class NotPosed(EnvironmentFailure):
  """An episode in which others take part was not begun, since its prompt was only looked at (`only_looked_at`)."""


class GraderFailure(EnvironmentFailure):
  """The reward could not be computed, or is not one finite scalar."""
