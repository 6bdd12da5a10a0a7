"""Nested frozen dataclasses as trees of named fields: types checked, values replaced, written as JSON, compared.

A field's name is its dotted path, as in "algorithm.epsilon_low"; within a tuple of dataclasses it has a number, as in
"environment.parts.0.weight". Nothing is ever evaluated or unpickled.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from sao_jax.config import RunConfig
from sao_jax.configuration.field_values import conform
from sao_jax.errors import ConfigError

MISSING = "(no such field)"  # on one side of a difference
NO_JSON = {"inf", "-inf", "nan"}  # numbers that JSON holds as strings
TYPE_KEY = "dataclass"  # in JSON: the name of the dataclass that a mapping was
MODULE_KEY, FILE_KEY = "module", "file"  # in JSON: where that class stands, if not in sao_jax.config

# Fields that there once were: what to use instead.
REMOVED = {
  "max_consecutive_failures": "Use rollout.outage_seconds: the run stops after so many seconds of nothing but failures."
}


def is_section(value: Any) -> bool:
  """True for a dataclass instance, that is, for what has fields of its own."""
  return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_numbered(value: Any) -> bool:
  """True for a tuple of sections, whose paths have numbers: the parts of a mixture."""
  return isinstance(value, list | tuple) and bool(value) and all(map(is_section, value))


def sections_at(path: str, value: Any) -> dict[str, Any]:
  """Finds the sections that a field holds, by their paths: itself, or the numbered ones of a tuple; {} for a value."""
  if is_numbered(value):
    return {f"{path}.{index}": item for index, item in enumerate(value)}
  return {path: value} if is_section(value) else {}


def annotations(section: Any) -> dict[str, Any]:
  """The type annotation, bounds included, of every settable field of a dataclass instance."""
  hints = typing.get_type_hints(type(section), include_extras=True)
  return {field.name: hints[field.name] for field in dataclasses.fields(section) if field.init}


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
  """Yields (path, value, annotation) of every field that is not itself a section."""
  for name, annotation in annotations(section).items():
    value = getattr(section, name)
    inner = sections_at(f"{prefix}{name}", value)
    for path, each in inner.items():
      yield from leaves(each, f"{path}.")
    if not inner:
      yield f"{prefix}{name}", value, annotation


def get(config: Any, path: str) -> Any:
  """The value at a dotted path."""
  for name in path.split("."):
    config = config[int(name)] if is_numbered(config) else getattr(config, name)
  return config


def check_types(section: Any, prefix: str = "") -> None:
  """Raises ConfigError naming the first field whose value has another type than its annotation."""
  for name, annotation in annotations(section).items():
    value = getattr(section, name)
    conform(value, annotation, f"{prefix}{name}")
    for path, each in sections_at(f"{prefix}{name}", value).items():
      check_types(each, f"{path}.")


def replace(section: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
  """Returns `section` with the fields at the dotted paths in `values` replaced.

  Integers become floats and lists become tuples where the field wants them. Raises ConfigError naming the field for an
  unknown path (with the nearest names), a section, or a value of the wrong type.
  """
  if is_numbered(section):
    return _replace_numbered(section, values, prefix)
  known = annotations(section)
  changes: dict[str, Any] = {}
  nested: dict[str, dict[str, Any]] = {}

  # Each path is a field of this section, or leads into a section within it.
  for path, value in values.items():
    name, _, rest = path.partition(".")
    here = f"{prefix}{name}"
    if name not in known or (rest and not sections_at(here, _inner(section, name, known))):
      raise unknown_field(f"{prefix}{path}", [f"{prefix}{known_path}" for known_path, _, _ in leaves(section)])
    if rest:
      nested.setdefault(name, {})[rest] = value
    elif inner := sections_at(here, getattr(section, name)):
      raise _no_field(here, inner)
    else:
      changes[name] = conform(value, known[name], here)

  for name, inner in nested.items():
    changes[name] = replace(_inner(section, name, known), inner, f"{prefix}{name}.")
  return dataclasses.replace(section, **changes)


def _replace_numbered(sections: Any, values: Mapping[str, Any], prefix: str) -> Any:
  """Does what `replace` does, in a tuple of sections: paths begin with a number."""
  nested: dict[int, dict[str, Any]] = {}
  for path, value in values.items():
    number, _, rest = path.partition(".")
    if number not in map(str, range(len(sections))):
      remedy = f"Use a number from 0 to {len(sections) - 1}, as in {prefix}0."
      raise ConfigError(f"{prefix}{path}", f"there is no {number!r} of {len(sections)}.", remedy)
    if not rest:
      raise _no_field(f"{prefix}{number}", {f"{prefix}{number}": sections[int(number)]})
    nested.setdefault(int(number), {})[rest] = value
  changed = (replace(each, nested.get(index, {}), f"{prefix}{index}.") for index, each in enumerate(sections))
  return type(sections)(changed)


def _no_field(path: str, sections: Mapping[str, Any]) -> ConfigError:
  """The error for a path that leads to `sections`, of which a field is to be named."""
  kind = "a section" if path in sections else "a tuple of sections"
  fields = ", ".join(f"{place}.{field}" for place, each in sections.items() for field in annotations(each))
  return ConfigError(path, f"it is {kind}, not a field.", f"Set one of its fields: {fields}.")


def filled(section: Any) -> Any:
  """`section` with every section in it that may be None, and is, at its defaults: all paths that can be set."""
  if is_numbered(section):
    return type(section)(map(filled, section))
  known = annotations(section)
  inner = {name: _inner(section, name, known) for name in known}
  changes = {name: filled(value) for name, value in inner.items() if sections_at(name, value)}
  return dataclasses.replace(section, **changes)


def _inner(section: Any, name: str, known: Mapping[str, Any]) -> Any:
  """The value of a field; of a section that may be None, and is, the one with its defaults."""
  value = getattr(section, name)
  classes = [option for option in typing.get_args(known[name]) if dataclasses.is_dataclass(option)]
  return classes[0]() if value is None and classes else value


def unknown_field(
  path: str,
  known: list[str],
  problem: str = "there is no such field.",
  otherwise: str = "The fields are listed in sao_jax/config.py.",
) -> ConfigError:
  """The error for a field that does not exist, with the nearest names as the remedy, or `otherwise` if none is near."""
  last = path.rpartition(".")[2]
  if last in REMOVED:
    return ConfigError(path, "this field was removed.", REMOVED[last])
  same_name = [name for name in known if name.rpartition(".")[2] == last]
  near = same_name or difflib.get_close_matches(path, known, n=3, cutoff=0.7)
  if not near:
    by_last = {name.rpartition(".")[2]: name for name in known}
    near = [by_last[name] for name in difflib.get_close_matches(last, by_last, n=3, cutoff=0.6)]
  remedy = f"Did you mean {' or '.join(near)}?" if near else otherwise
  return ConfigError(path, problem, remedy)


def nearest(value: str, choices: tuple[str, ...]) -> str:
  """The remedy for a string that is none of `choices`."""
  near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
  hint = f"Did you mean {near[0]!r}? " if near else ""
  return f"{hint}Use one of {', '.join(map(repr, choices))}."


def to_json(value: Any) -> Any:
  """Plain JSON values: dataclasses as objects that name their type, tuples as lists, enums by value.

  JSON has no infinity: such a number becomes a string, as in "inf".
  """
  if is_section(value):
    fields = {name: to_json(getattr(value, name)) for name in annotations(value)}
    return {TYPE_KEY: type(value).__qualname__} | _place(type(value)) | fields
  if isinstance(value, list | tuple):
    return [to_json(item) for item in value]
  if isinstance(value, Mapping):
    return {str(key): to_json(item) for key, item in value.items()}
  if isinstance(value, enum.Enum):
    return value.value
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _place(class_: type) -> dict[str, str]:
  """Names the module of a class, and outside this package the file, too."""
  name = class_.__module__
  if name == RunConfig.__module__:
    return {}
  file = getattr(sys.modules.get(name), "__file__", None)
  return {MODULE_KEY: name} | ({FILE_KEY: file} if file and not name.startswith("sao_jax.") else {})


def differences(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
  """The (path, old, new) of all fields in which two `to_json` results differ; MISSING where one has no such field.

  Where a class was found makes no difference. Lists of as many dataclasses are compared one by one.
  """
  if _same_length(old, new):
    old, new = (dict(enumerate(value)) for value in (old, new))
  if not isinstance(old, Mapping) or not isinstance(new, Mapping):
    same = old == new or str(old) == str(new) in NO_JSON  # "inf", and as older versions wrote it
    return [] if same else [(prefix.rstrip("."), old, new)]
  names = [name for name in dict.fromkeys([*old, *new]) if name not in (MODULE_KEY, FILE_KEY) or TYPE_KEY not in new]
  pairs = ((name, old.get(name, MISSING), new.get(name, MISSING)) for name in names)
  return [change for name, before, now in pairs for change in differences(before, now, f"{prefix}{name}.")]


def _same_length(old: Any, new: Any) -> bool:
  """Tells if both are lists of as many dataclasses, as `to_json` writes them."""
  listed = isinstance(old, list) and isinstance(new, list) and len(old) == len(new) > 0
  return listed and all(isinstance(item, Mapping) and TYPE_KEY in item for item in (*old, *new))
