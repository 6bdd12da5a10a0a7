"""Configurations as JSON that can be read back: every section names its class, and where the class is found."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Mapping
from typing import Any

from sao_jax import config as core
from sao_jax.config import RunConfig
from sao_jax.configuration import config_tree
from sao_jax.configuration.config_tree import MODULE_KEY, NO_JSON, TYPE_KEY
from sao_jax.configuration.field_values import conform, without_bounds


def from_json(record: Mapping[str, Any]) -> RunConfig:
  """Rebuilds what `config_tree.to_json` wrote; fields that it did not know yet have their defaults.

  Classes are imported by name from what is installed; no file is run because a record names it.

  Raises:
    Exception: whatever goes wrong: a class that is not there, a value that JSON could not hold.
  """
  config = _section(record)
  if not isinstance(config, RunConfig):
    raise TypeError(f"it is a {type(config).__name__}")
  return config


def is_faithful(config: RunConfig) -> bool:
  """True if `config` comes back from JSON as it is: JSON has no int keys, and none of the user's own objects."""
  try:
    return from_json(config_tree.to_json(config)) == config
  except Exception:  # whatever the user's classes may raise
    return False


def _section(record: Mapping[str, Any]) -> Any:
  class_ = _find_class(record)
  hints = typing.get_type_hints(class_, include_extras=True)
  values = {name: _value(value) for name, value in record.items() if name in hints}
  number = lambda name: without_bounds(hints[name]) is float and values[name] in NO_JSON
  values |= {name: float(values[name]) for name in values if number(name)}
  return class_(**{name: conform(value, hints[name], name) for name, value in values.items()})


def _value(value: Any) -> Any:
  if isinstance(value, Mapping):
    return _section(value) if TYPE_KEY in value else {key: _value(item) for key, item in value.items()}
  return [_value(item) for item in value] if isinstance(value, list) else value


def _find_class(record: Mapping[str, Any]) -> type:
  """Finds the dataclass of a section by the name of its module."""
  found: Any = importlib.import_module(record.get(MODULE_KEY, core.__name__))
  for part in record[TYPE_KEY].split("."):
    found = getattr(found, part)
  if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
    raise TypeError(f"{record[TYPE_KEY]} is no dataclass")
  return found
