"""Requests to the sampler and its answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxtyping import Float, Int
from numpy import ndarray

from sao_jax.errors import ConfigError
from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.state import MAX_STOP_IDS

OnTokens = Callable[[list[int], list[float], int], None]


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
  """One turn: tokens to append to a session, and the rules for sampling the answer.

  Attributes:
    session_id: names a trajectory in the making; the first request with this number starts the session.
    rollout_id: in [0, 2³¹); with the run seed it determines the random numbers of the whole session.
    new_token_ids: the prompt, or the tokens that the environment appended since the last turn (perhaps none).
    max_tokens: at least 1; the turn gets fewer tokens if the context has fewer left.
    stop_ids: tokens that end the turn; a sampled stop token is part of the answer.
    temperature: 0 takes the most probable token, for evaluation only.
    keep_slot: True keeps the session for another turn, until `release`; False forgets it after this one.
    new_context: True replaces everything that the session holds by `new_token_ids` (for example a rewritten history).
    weights: sample this session with these, in place of the published ones; the same in all its turns.
    on_sampled: called in the sampler's thread whenever tokens of the turn have been sampled, with the policy version
      that sampled them; must not block. A sampler may leave it out, as all versions come with the completion.
    on_tokens: called likewise, before `on_sampled`, with these tokens, their log-probabilities and that version.

  >>> request = GenerateRequest(session_id=0, rollout_id=7, new_token_ids=(1, 42, 3), max_tokens=16, stop_ids=(2,))
  >>> request.temperature
  1.0
  >>> request_problem(request, vocab_size=64) is None
  True
  >>> request_problem(request, vocab_size=32).field
  'new_token_ids'
  """

  session_id: int
  rollout_id: int
  new_token_ids: Sequence[int] | Int[ndarray, " n"]
  max_tokens: int
  stop_ids: tuple[int, ...] = ()
  temperature: float = 1.0
  keep_slot: bool = False
  new_context: bool = False
  weights: Weights | None = dataclasses.field(default=None, compare=False, repr=False)
  on_sampled: Callable[[int], None] = dataclasses.field(default=lambda version: None, compare=False, repr=False)
  on_tokens: OnTokens | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Completion:
  """The sampled tokens of one turn.

  Attributes:
    token_ids: int32; a sampled stop token is the last one.
    logprobs: float32, recorded when the tokens were sampled.
    policy_versions: int32, the version of the weights that sampled each token.
    finish_reason: "stop" after a stop token, "length" after max_tokens, "context" when the context is full (perhaps
      before the first token).
    routed_experts: int16 [m, L, k], the experts used for the m tokens that the model has read since the session's last
      turn: new and sampled ones in order, without the last sampled one, which is read in the next turn. None if experts
      are not recorded.
  """

  token_ids: Int[ndarray, " n"]
  logprobs: Float[ndarray, " n"]
  policy_versions: Int[ndarray, " n"]
  finish_reason: str
  routed_experts: Int[ndarray, "m L k"] | None = None


class SessionReleasedError(RuntimeError):
  """The session was released while its turn was still running."""


class ServiceStoppedError(RuntimeError):
  """The sampler was stopped while the turn was still running."""


def request_problem(request: GenerateRequest, vocab_size: int) -> ConfigError | None:
  """Returns the error of a request that cannot be served whatever the session holds; None for a sound one."""
  if request.max_tokens < 1:
    return ConfigError("max_tokens", f"it is {request.max_tokens}.", "sample at least one token.")
  if not (math.isfinite(request.temperature) and request.temperature >= 0):
    return ConfigError("temperature", f"it is {request.temperature}.", "use 0 (greedy) or a positive number.")
  if not 0 <= request.rollout_id < 2**31:
    return ConfigError("rollout_id", f"it is {request.rollout_id}.", "use a number that fits into 31 bits.")
  if len(request.stop_ids) > MAX_STOP_IDS:
    return ConfigError("stop_ids", f"there are {len(request.stop_ids)} of them.", f"use at most {MAX_STOP_IDS}.")
  for field in ("new_token_ids", "stop_ids"):
    ids = [int(token) for token in getattr(request, field)]
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
      return ConfigError(field, f"ids from {min(ids)} to {max(ids)}.", f"use ids in [0, {vocab_size}), the vocabulary.")
  return None
