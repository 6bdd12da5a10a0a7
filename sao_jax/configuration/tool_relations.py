"""Refuses tools that could outlast the call of their environment, whose time-out discards an episode unpunished."""

from __future__ import annotations

from collections.abc import Iterator

from sao_jax.config import RunConfig
from sao_jax.configuration import config_tree
from sao_jax.errors import ConfigError


def tool_relations(config: RunConfig) -> Iterator[ConfigError]:
  """Yields the fields `turn_timeout` of an environment, inside of wrappers and mixtures too, that leave no room."""
  environment, longest = config.environment, config.rollout.environment_timeout
  for path, value, _ in config_tree.leaves(environment, "environment.") if config_tree.is_section(environment) else ():
    if path.endswith(".turn_timeout") and isinstance(value, int | float) and value >= longest:
      problem = f"tools may take {value:g} s in one turn, and the environment has {longest:g} s to answer it."
      yield ConfigError(path, problem, f"Raise rollout.environment_timeout above it, or lower {path}.")
