"""Two kinds of errors that a user can do something about: bad input, before any work, and the end of a run."""

from __future__ import annotations

EXIT_FAILURE, EXIT_BAD_INPUT = 1, 2  # statuses of programs: of the end of a run, and of bad input


class ConfigError(ValueError):
  """A setting that cannot work. The message is one screen: the field, what is wrong, what to do."""

  def __init__(self, field: str, problem: str, remedy: str):
    """`field` is the dotted config path or input name; `problem` and `remedy` are full sentences."""
    self.field, self.problem, self.remedy = field, problem, remedy
    super().__init__(f"{field}: {problem}\n  remedy: {remedy}")


class RunError(RuntimeError):
  """The end of a run for a reason outside of its code, as a full disk is one. The message names reason and remedy.

  Programs show the message without a traceback, as the last thing that they say.
  """


class ProcessFailed(RunError):
  """Another process has failed, or shows no sign of life; its own log says more.

  Attributes:
    process: which one.
    status: its exit status, which is that of all.
  """

  def __init__(self, message: str, process: int = 0, status: int = EXIT_FAILURE):
    super().__init__(message)
    self.process, self.status = process, status
