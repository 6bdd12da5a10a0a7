"""Places and outcomes of rollouts, and the errors of the rollout room.

Every submitted rollout has exactly one place (in flight, buffered, in training) or one `Outcome`; an environment's
failure or bad evidence is an outcome with a named reason, never a reward of 0. Everything else stops the run.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from sao_jax.episode import BadPrompt, EnvironmentFailure, GraderFailure, InfrastructureFailure
from sao_jax.errors import ConfigError, RunError


class Place(enum.Enum):
  """The places of a rollout without an outcome."""

  IN_FLIGHT = "in_flight"  # running, or waiting for a slot
  BUFFERED = "buffered"
  IN_TRAINING = "in_training"


class Outcome(enum.Enum):
  """The ends of a rollout."""

  TRAINED = "trained"
  MASKED = "masked"  # handed to the train step, but some of its tokens (over age), or all (cut), left out of the losses
  FILTERED = "filtered"  # its evidence (ids, log-probs, versions, reward) was bad
  FAILED_INFRASTRUCTURE = "failed_infrastructure"  # sandbox, server, grader, time-out
  FAILED_ENVIRONMENT = "failed_environment"  # the environment broke its contract or raised something unknown
  SKIPPED_PROMPT = "skipped_prompt"  # nobody can attempt its prompt: too long, empty, damaged
  DROPPED_STALE = "dropped_stale"  # older than the staleness bound when it was wanted
  ABORTED = "aborted"  # cut by the loop itself, when it stopped


def check_identity(counters: Mapping[str, int]) -> None:
  """Checks `submitted == sum of places + sum of outcomes` in what `Ledger.counters` returned.

  Raises:
    RuntimeError: a rollout was lost or counted twice.
  """
  parts = {item.value: counters[item.value] for item in (*Place, *Outcome)}
  if counters["submitted"] != sum(parts.values()) or min(parts.values()) < 0:
    raise RuntimeError(f"submitted {counters['submitted']} is not the sum of {parts}")


class EnvironmentTimeout(InfrastructureFailure):
  """A call to the environment took longer than `rollout.environment_timeout`."""


class EventLoopBlocked(EnvironmentTimeout):
  """A call to the environment held the event loop, in which all episodes run, for longer than it may take."""

  retryable_by_default = False


class UnexpectedFailure(EnvironmentFailure):
  """An environment raised an exception that the contract does not know: discarded and logged as an error."""


class BadEvidence(Exception):
  """A trajectory cannot be trained on.

  Attributes:
    reason: a short fixed name, under which it is counted.
  """

  def __init__(self, reason: str, detail: str):
    self.reason = reason
    super().__init__(f"{reason}: {detail}")


class PromptTooLong(BadPrompt):
  """A prompt leaves no room for a single sampled token."""

  def __init__(self, prompt_length: int, context_length: int, name: str):
    super().__init__(
      "sampler.context_length",
      f"prompt {name} has {prompt_length} tokens, which leaves no room to answer in a context of {context_length}",
      f"set sampler.context_length above {prompt_length} (and rollout.row_lengths with it), or choose shorter prompts",
      reason="prompt_too_long",
    )


class PromptEmpty(BadPrompt):
  """A prompt has no token at all."""

  def __init__(self, environment: str, name: str):
    super().__init__(
      "prompts",
      f"environment {environment!r} made no token of prompt {name}",
      "leave such items out, or let `reset` return at least a begin-of-sequence token",
      reason="prompt_empty",
    )


class NothingButBadPrompts(ConfigError):
  """So many prompts in a row were skipped that the data set, or the configuration, is wrong."""

  def __init__(self, skipped: int, last: BadPrompt):
    super().__init__(
      last.field, f"{skipped} prompts in a row were skipped, the last one since {last.problem}", last.remedy
    )
    self.__cause__ = last


class NothingButBadEvidence(RunError):
  """So many rollouts in a row were filtered that the sampler is broken."""

  def __init__(self, filtered: int, last: BadEvidence):
    super().__init__(f"the sampler: {filtered} rollouts in a row cannot be trained on, the last one: {last}")
    self.__cause__ = last


class NothingButEqualGroups(RunError):
  """So many groups in a row had equal returns that no batch will fill."""

  def __init__(self, groups: int, value: float):
    super().__init__(
      f"rollout.filter_equal_groups: {groups} groups in a row had equal returns, the last one {value:g}: the prompts "
      "are too hard, or too easy. Choose others, or set it to False."
    )


class EnvironmentDown(RunError):
  """One environment did nothing but fail for `rollout.outage_seconds`; the last failure is the cause.

  Attributes:
    environment: its name.
  """

  def __init__(self, environment: str, seconds: float, failures: int, last: BaseException):
    self.environment = environment
    attempts = f"all {failures} attempts" if failures > 1 else "the only attempt"
    super().__init__(
      f"environment {environment!r}: {attempts} in {seconds:.3g} s failed (rollout.outage_seconds), the last one "
      f"with: {last}. Bring it back: the same command goes on."
    )
    self.__cause__ = last


class PromptsExhausted(RunError):
  """The prompt iterator has ended and the rollouts left do not fill a batch."""


class LoopStopped(RuntimeError):
  """A batch was asked of a rollout loop that has been stopped."""


class RolloutSilent(RunError):
  """Rollouts are in flight, yet nothing has happened for `training.watchdog_seconds`."""


def outcome_of(failure: EnvironmentFailure) -> Outcome:
  """Infrastructure and graders fail by themselves; anything else is the environment's own fault."""
  if isinstance(failure, InfrastructureFailure | GraderFailure):
    return Outcome.FAILED_INFRASTRUCTURE
  return Outcome.FAILED_ENVIRONMENT


def reason_of(failure: EnvironmentFailure) -> str:
  """A short name to count the failure under: its type, with the type of its cause."""
  cause = failure.__cause__
  return type(failure).__name__ + (f"({type(cause).__name__})" if cause is not None else "")
