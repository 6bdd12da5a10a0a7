"""A single field: a value made to fit its annotation, read from the text of a command line, described in words."""

from __future__ import annotations

import ast
import collections.abc
import types
import typing
from typing import Annotated, Any, Literal

from sao_jax.errors import ConfigError

_TRUE, _FALSE = ("true", "t", "1"), ("false", "f", "0")


def without_bounds(annotation: Any) -> Any:
  """The type alone of an annotation that may carry bounds."""
  return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


def is_switch(annotation: Any) -> bool:
  """True for fields that may be true or false, and so need no value on a command line."""
  members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
  return bool in members and not {int, float} & {*members}  # of which 0 and 1 would be others


def conform(value: Any, annotation: Any, path: str) -> Any:
  """Returns `value` as its field wants it: integers become floats, lists tuples. Bounds are not looked at.

  Raises:
    ConfigError: it does not fit; the error names `path`.
  """
  try:
    return _convert(value, annotation)
  except TypeError as error:
    raise wrong_type(path, value, annotation) from error


def fits(value: Any, annotation: Any) -> bool:
  """True when `value` has the annotated type, or becomes it as in `conform`."""
  try:
    _convert(value, annotation)
  except TypeError:
    return False
  return True


def parse(text: str, annotation: Any, path: str) -> Any:
  """Reads a value from a command line: numbers, true or false, Python literals; strings as they are.

  Raises:
    ConfigError: the text says nothing of this type; the error names `path`.
  """
  try:
    return _convert(_read(text, annotation), annotation)
  except (TypeError, ValueError) as error:
    raise wrong_type(path, text, annotation) from error


def wrong_type(path: str, value: Any, annotation: Any) -> ConfigError:
  """The error for a value that does not fit the annotation of its field."""
  got = f"{value!r} ({type(value).__name__})"
  return ConfigError(path, f"got {got}, expected {describe(annotation)}.", f"Give {path} {_example(annotation)}.")


def describe(annotation: Any) -> str:
  """A type annotation in words: "float in (0, 1]", "zero | bootstrap | mask", "a tuple of int in [1, inf)"."""
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is Annotated:
    inner, interval = arguments
    return describe(inner) if typing.get_origin(inner) is tuple else f"{describe(inner)} in {interval}"
  if origin is Literal:
    return " | ".join(map(str, arguments))
  if origin is tuple and arguments:
    return f"a tuple of {describe(arguments[0])}"
  if _is_union(annotation):
    return " or ".join(describe(argument) for argument in arguments)
  names = {type(None): "None", bool: "true or false"}
  return names.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _is_union(annotation: Any) -> bool:
  return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _example(annotation: Any) -> str:
  examples = {
    int: "a whole number, as in 8",
    float: "a number, as in 0.3 or 1e-6",
    bool: "true or false",
    str: "a string",
  }
  plain = without_bounds(annotation)
  if typing.get_origin(plain) is tuple:
    item = typing.get_args(plain)[0]
    choices = typing.get_args(item) if typing.get_origin(item) is Literal else (1, 2)
    return f"{describe(annotation)}, as in ({', '.join(map(repr, choices))})"
  return examples[plain] if plain in (int, float, bool, str) else describe(annotation)


def _read(text: str, annotation: Any) -> Any:
  """The value that `text` means where `annotation` is wanted; ValueError when it means none."""
  plain = without_bounds(annotation)
  origin, arguments = typing.get_origin(plain), typing.get_args(plain)
  if plain is str or (origin is Literal and all(isinstance(choice, str) for choice in arguments)):
    return text
  if is_switch(plain) and text.lower() in (*_TRUE, *_FALSE):
    return text.lower() in _TRUE
  if plain is bool:
    raise ValueError(text)
  if plain in (int, float):
    return plain(text)
  value = _literal(text)
  # A tuple of one needs no comma.
  return (value,) if origin is tuple and isinstance(value, int | float | str) else value


def _literal(text: str) -> Any:
  try:
    return ast.literal_eval(text.strip())
  except (ValueError, SyntaxError):
    return text  # which fits where a string does


def _convert(value: Any, annotation: Any) -> Any:
  """`value` as the annotation wants it; TypeError when it does not fit."""
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is Annotated:
    return _convert(value, arguments[0])
  if _is_union(annotation):
    return _first_that_fits(value, arguments)
  if origin is Literal:  # which of the names are allowed is a bound
    return _first_that_fits(value, tuple(dict.fromkeys(map(type, arguments))))
  if origin is tuple:
    _require(value, isinstance(value, list | tuple))
    variadic = len(arguments) == 2 and arguments[1] is Ellipsis
    wanted = [arguments[0]] * len(value) if variadic else arguments
    _require(value, len(wanted) == len(value))
    return tuple(_convert(item, argument) for item, argument in zip(value, wanted))

  # A bool is no number, although Python has it as an int.
  if annotation is float:
    return float(_require(value, isinstance(value, int | float) and not isinstance(value, bool)))
  if annotation is int:
    return _require(value, isinstance(value, int) and not isinstance(value, bool))
  if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
    return _require(value, isinstance(value, origin))
  if isinstance(annotation, type) and annotation is not Any:
    return _require(value, isinstance(value, annotation))
  return value  # annotations that say more, or less, than a configuration needs


def _first_that_fits(value: Any, annotations: tuple[Any, ...]) -> Any:
  for annotation in annotations:
    if fits(value, annotation):
      return _convert(value, annotation)
  raise TypeError


def _require(value: Any, fits: bool) -> Any:
  if not fits:
    raise TypeError
  return value
