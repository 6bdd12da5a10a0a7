"""Names and settings of reasoning-gym tasks, checked; the package is imported only when a task is created."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from sao_jax.errors import ConfigError

# The scorers of these tasks evaluate the answer (eval, or sympy's parser, which calls it), or work without a bound on a
# short one (a fraction with the exponent 999999999, a piece moved 999999999 times): text that a policy wrote could run
# code or never end. From a reading of all scorers of reasoning-gym 0.1.25.
UNSAFE_TASKS = frozenset(
  (
    "binary_matrix",
    "coin_flip",
    "composite",  # may hold any of the others
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "rubiks_cube",
    "rush_hour",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
  )
)


def check_task(task: str, task_config: Mapping[str, Any]) -> None:
  """Checks a task's name and settings as far as that works without the package.

  Raises:
    ConfigError: for a task with an unsafe scorer, and for settings that the environment makes itself.
  """
  if task in UNSAFE_TASKS:
    raise ConfigError(
      "environment.task",
      f"The scorer of {task!r} evaluates what the model wrote, without a bound.",
      "Choose another task.",
    )
  reserved = sorted({"seed", "size"} & set(task_config))
  if reserved:
    raise ConfigError(
      "environment.task_config",
      f"{' and '.join(reserved)} cannot be set here.",
      "Seeds come from the run, the size from environment.num_prompts.",
    )


def create_dataset(task: str, task_config: Mapping[str, Any], *, seed: int, size: int) -> Any:
  """Creates the task's data set of `size` entries.

  Raises:
    ConfigError: when the package is missing, the task or a setting does not exist, or a value is refused.
  """
  try:
    from reasoning_gym.factory import DATASETS
  except ImportError as error:
    raise ConfigError(
      "environment", f"The package reasoning-gym is not installed ({error}).", "Run: pip install -e '.[envs]'"
    ) from error

  # Names are checked here, so that a typing error is answered with the nearest name.
  if task not in DATASETS:
    raise ConfigError("environment.task", f"reasoning-gym has no task {task!r}.", nearest(task, DATASETS))
  dataset_class, config_class = DATASETS[task]
  known = [field.name for field in dataclasses.fields(config_class) if field.name not in ("seed", "size")]
  for name in task_config:
    if name not in known:
      raise ConfigError(f"environment.task_config.{name}", f"Task {task!r} has no such setting.", nearest(name, known))

  # Values are checked by the task itself.
  try:
    config = config_class(**task_config, seed=seed, size=size)
    return dataset_class(config=config)
  except (AssertionError, TypeError, ValueError) as error:
    raise ConfigError(
      "environment.task_config", f"Task {task!r} refuses its settings: {error}", f"Its settings are {known}."
    ) from error


def nearest(name: str, known: Mapping[str, Any] | list[str]) -> str:
  """Writes the remedy for an unknown name: the known names that resemble it, or else all of them."""
  matches = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  return f"Did you mean {', '.join(matches)}?" if matches else f"Choose among: {', '.join(sorted(known))}."
