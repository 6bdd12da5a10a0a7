"""What the rooms without jax (environments, rewards, data) share with the rest; `sao_jax.types` exports both names."""

from __future__ import annotations

import enum
from typing import NamedTuple


class PromptKey(NamedTuple):
  """Names one prompt for ever: which environment, which example of it, which pass over the data."""

  environment: str
  id: int
  epoch: int


class Status(enum.Enum):
  """How an episode ended. Only TERMINATED has a true end state, V(s_n) = 0."""

  TERMINATED = "terminated"
  TRUNCATED_LENGTH = "truncated(length)"  # the per-episode budget of sampled tokens ran out
  TRUNCATED_TURNS = "truncated(turns)"  # the turn limit was reached
  TRUNCATED_CONTEXT = "truncated(context)"  # prompt + actions + observations filled the context

  @property
  def truncated(self) -> bool:
    return self is not Status.TERMINATED
