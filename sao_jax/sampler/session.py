"""Host bookkeeping of one trajectory in the making."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from sao_jax.sampler.prefill import Extension
from sao_jax.sampler.requests import Completion, GenerateRequest

OnDone = Callable[[Completion | BaseException], None]


@dataclasses.dataclass(eq=False)
class Turn:
  """A request that is queued or being decoded.

  Attributes:
    request: as the caller gave it, never changed.
    on_done: called once.
    budget: tokens granted: request.max_tokens, or what the context has left.
    steps_left: decode steps that the device may still take, at most; 0 means that the turn surely ends in a dispatch
      that is already started.
    token_ids: sampled so far and read back.
    logprobs: of those.
    versions: of those.
  """

  request: GenerateRequest
  on_done: OnDone
  budget: int
  steps_left: int
  token_ids: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)

  @property
  def finished(self) -> bool:
    """Has the device ended the turn, as far as was read back?"""
    return len(self.token_ids) == self.budget or bool(self.token_ids and self.token_ids[-1] in self.request.stop_ids)

  def completion(self, routed_experts: Int[np.ndarray, "m L k"] | None) -> Completion:
    """What the caller gets."""
    if self.token_ids and self.token_ids[-1] in self.request.stop_ids:
      reason = "stop"
    else:
      reason = "length" if self.budget == self.request.max_tokens else "context"
    return Completion(
      token_ids=np.array(self.token_ids, np.int32),
      logprobs=np.array(self.logprobs, np.float32),
      policy_versions=np.array(self.versions, np.int32),
      finish_reason=reason,
      routed_experts=routed_experts,
    )


@dataclasses.dataclass(eq=False)
class Session:
  """One trajectory.

  Attributes:
    rollout_id: names its random numbers.
    token_ids: all tokens of its context: prompts, observations, and the sampled ones that were read back.
    random_offset: tokens of its earlier contexts, so that no index of a random number is used twice.
    slot: where its keys and values live, or None: queued, parked, or about to end.
    written: tokens of the slot whose keys and values are valid, at most (exact between turns).
    turn: the running request, None while the environment works.
    idle_since: the tick at which the last turn ended.
    num_routed: tokens of the context whose experts are known.
    routed_experts: of those tokens, what no completion has handed out yet.
  """

  rollout_id: int
  token_ids: list[int] = dataclasses.field(default_factory=list)
  random_offset: int = 0
  slot: int | None = None
  written: int = 0
  turn: Turn | None = None
  idle_since: int = 0
  num_routed: int = 0
  routed_experts: list[np.ndarray] = dataclasses.field(default_factory=list)

  def begin_context(self) -> None:
    """Forgets the tokens; what the slot holds is written over."""
    self.random_offset += len(self.token_ids)
    self.token_ids, self.written, self.num_routed = [], 0, 0

  def extension(self) -> Extension:
    """Everything that the slot does not hold yet, and the rest of the turn; `written` and `steps_left` follow."""
    turn, start = self.turn, self.written
    turn.steps_left = turn.budget - len(turn.token_ids)
    self.written = len(self.token_ids) - 1
    return Extension(
      slot=self.slot,
      start=start,
      token_ids=self.token_ids[start:],
      rollout_id=self.rollout_id,
      random_offset=self.random_offset,
      budget=turn.steps_left,
      stop_ids=turn.request.stop_ids,
      temperature=turn.request.temperature,
    )

  def count_steps(self, num_steps: int) -> None:
    """Notes that a dispatch of `num_steps` was started."""
    steps = min(num_steps, self.turn.steps_left)
    self.turn.steps_left -= steps
    self.written += steps

  def record_experts(self, start: int, experts: Int[np.ndarray, "n L k"]) -> None:
    """Keeps the experts of the tokens from index `start` on; what was used first counts, at a later prefill too."""
    if self.num_routed < start:
      raise RuntimeError(f"the experts of tokens {self.num_routed} to {start} of rollout {self.rollout_id} are missing")
    new = experts[self.num_routed - start :]
    if len(new):
      self.routed_experts.append(new.copy())  # a view would keep the rows of all slots alive
      self.num_routed += len(new)

  def take_experts(self, shape: tuple[int, int] | None) -> Int[np.ndarray, "m L k"] | None:
    """What no completion has handed out yet, `shape` for every token; None: not recorded."""
    if shape is None:
      return None
    taken, self.routed_experts = self.routed_experts, []
    return np.concatenate([np.zeros((0, *shape), np.int16), *taken])

  def append(self, token_ids: list[int], logprobs: list[float], version: int) -> None:
    """Adds tokens that were read back."""
    self.token_ids += token_ids
    self.turn.token_ids += token_ids
    self.turn.logprobs += logprobs
    self.turn.versions += [version] * len(token_ids)
