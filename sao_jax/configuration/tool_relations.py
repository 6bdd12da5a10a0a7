"""Refuses tools that could outlast the call of their environment, whose time-out discards an episode unpunished."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sao_jax.config import RunConfig
from sao_jax.configuration import config_tree
from sao_jax.errors import ConfigError


def tool_relations(config: RunConfig) -> Iterator[ConfigError]:
  """Yields an error for each environment, inside of wrappers and mixtures too, whose own time-outs leave no room.

  What the tasks of an agent are taken from plays no episode.
  """
  longest = config.rollout.environment_timeout
  for path, settings in _environments("environment", config.environment):
    for seconds, field in _answers(settings):
      if seconds >= longest:
        problem = f"the answer to a turn may take {seconds:g} s, and the environment has {longest:g} s for it."
        remedy = f"Raise rollout.environment_timeout above {seconds:g}, or lower {field}."
        yield ConfigError(f"{path}.{field}", problem, remedy)


def _answers(settings: Any) -> Iterator[tuple[float, str]]:
  """Yields the seconds that an answer may take by rights, and the fields that they follow from."""
  if isinstance(getattr(settings, "turn_timeout", None), int | float):
    yield settings.turn_timeout, "turn_timeout"
  if hasattr(settings, "longest_answer"):
    yield settings.longest_answer, settings.longest_answer_fields


def _environments(path: str, settings: Any) -> Iterator[tuple[str, Any]]:
  """Yields all sections from this one down, by their paths."""
  if not config_tree.is_section(settings):
    return
  yield path, settings
  for name in config_tree.annotations(settings):
    if name != "tasks":
      for inner, each in config_tree.sections_at(f"{path}.{name}", getattr(settings, name)).items():
        yield from _environments(inner, each)
