"""The one error that bad input raises: it names the field and the remedy, before any work starts."""

from __future__ import annotations


class ConfigError(ValueError):
  """A setting that cannot work. The message is one screen: the field, what is wrong, what to do."""

  def __init__(self, field: str, problem: str, remedy: str):
    """`field` is the dotted config path or input name; `problem` and `remedy` are full sentences."""
    self.field, self.problem, self.remedy = field, problem, remedy
    super().__init__(f"{field}: {problem}\n  remedy: {remedy}")
