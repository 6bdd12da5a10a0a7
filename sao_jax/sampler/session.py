"""Host bookkeeping of one trajectory in the making."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.prefill import Extension, Piece
from sao_jax.sampler.requests import Completion, GenerateRequest

OnDone = Callable[[Completion | BaseException], None]


@dataclasses.dataclass(eq=False)
class Turn:
  """A request that is queued or being decoded.

  Attributes:
    request: the caller's request, never changed.
    on_done: called once, with a Completion or an exception.
    budget: number of tokens granted: request.max_tokens, or fewer if the context has fewer left.
    steps_left: upper bound on the decode steps that the device still takes; 0 means that the turn ends in a dispatch
      that is already started.
    token_ids: tokens sampled and read back so far.
    logprobs: log-probability of each of these tokens.
    versions: policy version that sampled each of these tokens.
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
    """True if the tokens that were read back end the turn."""
    return len(self.token_ids) == self.budget or bool(self.token_ids and self.token_ids[-1] in self.request.stop_ids)

  def completion(self, routed_experts: Int[np.ndarray, "m L k"] | None) -> Completion:
    """Returns the answer to the caller."""
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
    rollout_id: determines its random numbers, together with the run seed.
    weights: those that it samples with; None: the published ones.
    token_ids: all tokens of its context: prompts, observations, and the sampled ones that were read back.
    random_offset: number of tokens in its earlier contexts, so that no index of a random number is used twice.
    slot: index of the slot that holds its keys and values; None while it is queued, parked, or about to end.
    arrival: its number in the order in which sessions got their slots.
    written: upper bound on the tokens whose keys and values in the slot are valid; exact between turns.
    unread: what no call has read yet of the tokens that begin the turn, where calls read them piece by piece.
    turn: the running request; None while the environment works.
    idle_since: the tick at which the last turn ended.
    num_routed: number of tokens of the context whose experts are known.
    routed_experts: the experts of those tokens that no completion has handed out yet, in pieces.
  """

  rollout_id: int
  weights: Weights | None = None
  token_ids: list[int] = dataclasses.field(default_factory=list)
  random_offset: int = 0
  slot: int | None = None
  arrival: int = 0
  written: int = 0
  unread: Piece | None = None
  turn: Turn | None = None
  idle_since: int = 0
  num_routed: int = 0
  routed_experts: list[np.ndarray] = dataclasses.field(default_factory=list)

  def begin_context(self) -> None:
    """Forgets the tokens; the next prefill overwrites the slot from its start."""
    self.random_offset += len(self.token_ids)
    self.token_ids, self.written, self.num_routed = [], 0, 0

  def extension(self) -> Extension:
    """Returns the tokens that the slot lacks and the rest of the turn; `written` and `steps_left` assume it is done."""
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
    """Notes that a dispatch of `num_steps` decode steps was started."""
    steps = min(num_steps, self.turn.steps_left)
    self.turn.steps_left -= steps
    self.written += steps

  def keep_experts(self, start: int, experts: Int[np.ndarray, "n L k"]) -> None:
    """Keeps the experts of the tokens from index `start` on; where a token has experts already, those stay."""
    if self.num_routed < start:
      raise RuntimeError(f"the experts of tokens {self.num_routed} to {start} of rollout {self.rollout_id} are missing")
    new = experts[self.num_routed - start :]
    if len(new):
      self.routed_experts.append(new.copy())  # a view would keep the rows of all slots alive
      self.num_routed += len(new)

  def take_experts(self, shape: tuple[int, int] | None) -> Int[np.ndarray, "m L k"] | None:
    """Returns and forgets the experts not handed out yet, `shape` (L, k) per token; None if they are not recorded."""
    if shape is None:
      return None
    taken, self.routed_experts = self.routed_experts, []
    return np.concatenate([np.zeros((0, *shape), np.int16), *taken])

  def append(self, token_ids: list[int], logprobs: list[float], version: int) -> None:
    """Adds tokens that were read back to the context and the turn."""
    self.token_ids += token_ids
    self.turn.token_ids += token_ids
    self.turn.logprobs += logprobs
    self.turn.versions += [version] * len(token_ids)
