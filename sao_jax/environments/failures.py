"""Typed failures of an environment: such an episode is dropped and counted, never scored 0.

What is the agent's own fault (a malformed call, a wrong program, too many turns) is not a failure: it is graded.
"""

from __future__ import annotations


class EnvironmentFailure(Exception):
  """The environment could not produce or grade the episode; carries the environment's name.

  Attributes:
    environment: name of the environment.
    problem: what happened, one sentence.
    retryable: whether the same call on a fresh instance may succeed.
  """

  retryable_by_default = False

  def __init__(self, environment: str, problem: str, *, retryable: bool | None = None):
    self.environment, self.problem = environment, problem
    self.retryable = self.retryable_by_default if retryable is None else retryable
    super().__init__(f"environment {environment!r}: {problem}")


class InfrastructureFailure(EnvironmentFailure):
  """A sandbox was not created, a server is gone, a disk is full: worth another try."""

  retryable_by_default = True


class GraderFailure(EnvironmentFailure):
  """The reward could not be computed, or is not one finite scalar."""
