"""Entries of the ledger: the attempt at a prompt, and from its end on the result."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from sao_jax.episode import Prompt, Trajectory
from sao_jax.rollout.outcomes import Place


@dataclasses.dataclass(frozen=True)
class Rollout:
  """One attempt at a prompt.

  Attributes:
    rollout_id: its number in the run; with the run's seed it determines all random keys.
    prompt: the task.
    sample: its number among the rollouts of this prompt.
  """

  rollout_id: int
  prompt: Prompt
  sample: int = 0


class Finished(NamedTuple):
  """A finished rollout, with the two numbers that decisions under the lock need.

  Attributes:
    trajectory: the result.
    num_sampled: its sampled tokens.
    version: the policy version that its age is measured from.
  """

  trajectory: Trajectory
  num_sampled: int
  version: int


@dataclasses.dataclass
class Entry:
  """A rollout without an outcome.

  Attributes:
    place: where it is.
    rollout: the attempt, as long as it is in flight: it may have to be made again.
    began: seconds on the buffer's clock when the attempt began.
    oldest: the policy version of its first sampled token; None before there is one.
    finished: the result, from then on.
  """

  place: Place
  rollout: Rollout | None = None
  began: float = 0.0
  oldest: int | None = None
  finished: Finished | None = None


class LedgerState(NamedTuple):
  """The ledger at one instant.

  Attributes:
    intake: JSON: the next number, and the unfinished rollouts with their prompts.
    admission: JSON: the counters.
    trajectories: what is finished and not trained on, the batches in training first.
  """

  intake: dict[str, Any]
  admission: dict[str, Any]
  trajectories: list[Trajectory]
