"""Reading a config.json: every field is used, restricted to what is implemented, or known not to matter.

A field that a file leaves out has the default that the family's config class has in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sao_jax.errors import ConfigError
from sao_jax.huggingface.families.ignored_fields import IGNORED

MISSING = object()  # as a default: there is none, the field is required
_OF_THE_FAMILY = object()  # as a default: that of the family's table
_REFUSED = object()  # as the meaning of null: it has none

_LARGEST = {int: 2**31, float: 1e300}
_KINDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string", tuple: "a list"}
_PLURALS = {int: "whole numbers", str: "strings"}


class Declared(NamedTuple):
  """The declaration of a field by a family's reader.

  Attributes:
    kind: "taken": it decides something; "only": it is refused unless it has an implemented value; "irrelevant".
    default: the meaning of a file without it; MISSING if it is required, or irrelevant.
  """

  kind: str
  default: Any = MISSING


class Fields:
  """The fields of a config.json, taken one by one; `finish` refuses those that nobody took.

  Problems are collected, so that one error lists all of them.

  Attributes:
    declared: a `Declared` for each name that was asked for so far.
  """

  def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, prefix: str = ""):
    """Starts to read.

    Args:
      values: the content of the file, or of one of its objects.
      defaults: the defaults of the family.
      prefix: what stands before the names in messages, with its dot.
    """
    self._values, self._defaults, self._prefix = values, defaults or {}, prefix
    self._left = set(values)
    self._problems: list[str] = []
    self.declared: dict[str, Declared] = {}

  def take(
    self,
    name: str,
    default: Any = _OF_THE_FAMILY,
    *,
    kind: type | None = None,
    items: type = str,
    null: Any = _REFUSED,
    least: int | None = None,
    aliases: tuple[str, ...] = (),
  ) -> Any:
    """Returns the field's value, a list as a tuple, a whole number as a float where the default is one.

    A value of another kind, or out of bounds, is refused by name.

    Args:
      name: of the field.
      default: its value where the file does not have it; left out: that of the family's table.
      kind: int, float, bool, str or tuple; None: that of the default.
      items: the kind of the entries of a list.
      null: the meaning of null. Without it null is refused, unless the default is None or an empty list.
      least: bound of a number; None: 1 for whole ones; a float must be positive.
      aliases: other names for the field; where several are given the last one counts, as in transformers.
    """
    default = self._defaults.get(name, MISSING) if default is _OF_THE_FAMILY else default
    for spelling in (name, *aliases):
      self._declare(spelling, Declared("taken", default))
    given = [spelling for spelling in (name, *aliases) if spelling in self._values]
    if not given:
      if default is MISSING:
        self._problems.append(f"{self._prefix}{name} is missing")
      return _placeholder(kind) if default is MISSING else default

    # Null, where it means something.
    value = self._values[given[-1]]
    if value is None and (null is not _REFUSED or default is None or default == ()):
      return default if null is _REFUSED else null

    # A value of the right kind.
    kind = kind or (str if default is MISSING else type(default))
    problem = _problem(value, kind, least)
    if kind is tuple and not problem and any(_problem(item, items, 0) for item in value):
      problem = f"a list of {_PLURALS[items]}"
    if problem:
      self._problems.append(f"{self._prefix}{given[-1]} = {value!r} is not {problem}")
      return _placeholder(kind) if default in (MISSING, None) else default
    return kind(value)

  def only(self, name: str, *implemented: Any) -> None:
    """Refuses all values of the field but these; a field that is absent means the default, or else the first one."""
    default = self._defaults.get(name, implemented[0])
    self._declare(name, Declared("only", default))
    value = self._values.get(name, default)
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in implemented):
      self.refuse(name, value)

  def holds(self, name: str, kind: type) -> bool:
    """True if the field is there with a value of this kind; for those that have two forms."""
    return isinstance(self._values.get(name), kind)

  def irrelevant(self, *names: str) -> None:
    """Accepts these fields with any value: they do not matter here."""
    for name in names:
      self._declare(name, Declared("irrelevant"))

  def refuse(self, name: str, value: Any) -> None:
    """Notes that this value of the field is not implemented."""
    self._problems.append(f"{self._prefix}{name} = {value!r} is not implemented")

  def finish(self, model_type: str) -> None:
    """Raises ConfigError, listing all fields that are missing, unknown or not implemented."""
    self.irrelevant(*IGNORED)
    self.only("is_encoder_decoder", False)
    problems = self._problems + self._unknown()
    if problems:
      raise ConfigError(
        f"config.json of {model_type}",
        "; ".join(problems) + ".",
        "Use a model without these; or, if a field does not change what the model computes, remove it from the file.",
      )

  def section(self, name: str) -> Fields:
    """Returns the fields inside a field, none where it is absent or null; `close` it when they are read."""
    self._declare(name, Declared("taken", None))
    value = self._values.get(name)
    if value is not None and not isinstance(value, Mapping):
      self._problems.append(f"{self._prefix}{name} = {value!r} is not an object")
    return Fields(value if isinstance(value, Mapping) else {}, prefix=f"{self._prefix}{name}.")

  def close(self, section: Fields) -> None:
    """Takes over the problems of a section, and the fields that nobody took there."""
    self._problems += section._problems + section._unknown()

  def __len__(self) -> int:
    return len(self._values)

  def _declare(self, name: str, declared: Declared) -> None:
    self._left.discard(name)
    if name not in self.declared or declared.kind != "irrelevant":
      self.declared[name] = declared

  def _unknown(self) -> list[str]:
    return [f"{self._prefix}{name} is not known" for name in sorted(self._left)]


def _problem(value: Any, kind: type, least: int | None) -> str:
  """Says what the value is not; empty if it is of this kind and within its bounds."""
  if kind in (int, float):
    number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not number or not abs(value) < _LARGEST[kind]:  # false for NaN, too
      return _KINDS[kind]
    if kind is float and least is None:
      return "" if value > 0 else "above 0"
    least = 1 if least is None else least
    return "" if value >= least else f"at least {least}"
  return "" if isinstance(value, list if kind is tuple else kind) else _KINDS[kind]


def _placeholder(kind: type | None) -> Any:
  """A value that lets the reader go on and find more problems; `finish` raises."""
  return kind(1) if kind in (int, float, bool) else "" if kind is str else () if kind is tuple else 1
