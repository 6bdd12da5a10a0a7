"""Functions of the user, named in settings by their place: "module:function"."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from sao_jax.errors import ConfigError


def named_function(name: str, field: str, *, kind: str = "function", remedy: str = "") -> Callable[..., Any]:
  """Imports what "module:function" names; the function may stand in a class, as in "module:Class.function".

  >>> named_function("math:sqrt", "environment.scorer")(4.0)
  2.0

  Args:
    name: the place.
    field: of the configuration, named in the error.
    kind: the role of the function, for the error: "scorer", "opponent".
    remedy: of the error; "": the form of a place.

  Raises:
    ConfigError: there is no such module or function, or what stands there cannot be called.
  """
  module, colon, function = name.partition(":")
  remedy = remedy or "Use 'module:function', of a module that can be imported."
  if not colon:
    raise ConfigError(field, f"There is no {kind} {name!r}.", remedy)
  try:
    found = functools.reduce(getattr, function.split("."), importlib.import_module(module))
  except (ImportError, AttributeError, ValueError) as error:
    raise ConfigError(field, f"There is no {kind} {name!r}: {error}.", remedy) from error
  if not callable(found):
    raise ConfigError(field, f"{name!r} is a {type(found).__name__}, not a function.", remedy)
  return found
