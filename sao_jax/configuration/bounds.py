"""The bounds that fields carry in their annotations, checked: names in `Literal`, intervals in `Annotated`."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Literal

from sao_jax.config import PositiveInt
from sao_jax.configuration import config_tree, field_values
from sao_jax.errors import ConfigError


def check_bounds(section: Any, prefix: str = "") -> None:
  """Raises ConfigError for the first field of a section, or of those within it, whose value its annotation excludes."""
  for path, value, annotation in config_tree.leaves(section, prefix):
    broken = _broken(value, annotation)
    if broken:
      raise ConfigError(path, *broken)


def contains(interval: str, value: float) -> bool:
  """True when a number lies in an interval in the usual notation, as "[0, inf)"; NaN lies in none."""
  low, high = (float(end) for end in interval[1:-1].split(","))
  above = value >= low if interval[0] == "[" else value > low
  below = value <= high if interval[-1] == "]" else value < high
  return above and below


def _broken(value: Any, annotation: Any) -> tuple[str, str] | None:
  """Problem and remedy of a value, which has the annotated type; None within its bounds."""
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is Literal and value not in arguments:
    return f"there is no {value!r}.", config_tree.nearest(value, arguments)
  if origin is Annotated:
    inner, interval = arguments
    return _broken(value, inner) or _outside(value, inner, interval)
  if origin is tuple:
    return next(filter(None, (_broken_item(value, item, arguments[0]) for item in value)), None)
  if origin in (typing.Union, types.UnionType):
    member = next(member for member in arguments if field_values.fits(value, member))
    broken = _broken(value, member)
    return (broken[0], f"Use {field_values.describe(annotation)}.") if broken else None
  return None


def _outside(value: Any, annotation: Any, interval: str) -> tuple[str, str] | None:
  if isinstance(value, tuple):
    return None if contains(interval, len(value)) else _no_sizes(value)
  if contains(interval, value):
    return None
  if annotation is int and interval.endswith("inf)"):
    least = interval[1:-1].split(",")[0]
    return f"{value} is too small.", f"Use a whole number of at least {least}."
  return f"{value} is outside {interval}.", f"Choose a number in {interval}."


def _broken_item(value: tuple, item: Any, annotation: Any) -> tuple[str, str] | None:
  """The same of one entry of a tuple."""
  broken = _broken(item, annotation)
  if broken and typing.get_origin(annotation) is Literal:
    choices = typing.get_args(annotation)
    return broken[0], f'Choose some of {", ".join(choices)}, as in "({",".join(map(repr, choices))})".'
  return _no_sizes(value) if broken and annotation == PositiveInt else broken


def _no_sizes(value: tuple) -> tuple[str, str]:
  return f"{value} is not a list of sizes.", "Give positive whole numbers, as in (64, 128)."
