"""Puts a type checker around the package: in the tests, every array has the shape that its annotation claims.

Functions and methods at the top of a module are checked, shapes by jaxtyping and the rest by beartype. Closures are not
(decorating them each time they are made costs more than tracing), nor constructors (JAX builds pytrees around anything,
also around shardings), nor the sampler's threads, which tests give fake engines.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import types
from collections.abc import Mapping
from typing import Any

import jax
import jaxtyping
import numpy as np
from beartype import BeartypeConf, beartype

ROOMS = ("parallel", "models", "algorithm", "sampler")
UNCHECKED = ("sao_jax.sampler.scheduler", "sao_jax.sampler.service")

_beartype = functools.partial(beartype, conf=BeartypeConf(is_pep484_tower=True))  # an int is a float


def install() -> None:
  """Replaces the functions, wherever they were imported to. Call it before anything imports the package."""
  early = [name for name in sys.modules if name.startswith(tuple(f"sao_jax.{room}" for room in ROOMS))]
  assert not early, f"{early[0]} was imported before its annotations could be checked"
  jaxtyping.Array = jax.Array | np.ndarray  # tests pass either
  checked = {}
  for room in ROOMS:
    package = importlib.import_module(f"sao_jax.{room}")
    for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
      module = importlib.import_module(name)
      if name not in UNCHECKED:
        checked |= _check_all(module)
  for name, module in list(sys.modules.items()):
    if name.startswith("sao_jax."):
      vars(module).update({key: checked[id(value)][1] for key, value in vars(module).items() if id(value) in checked})


def _check_all(module: types.ModuleType) -> dict[int, tuple[types.FunctionType, types.FunctionType]]:
  """Replaces the methods in place; returns (function, checked function) by the id of the function."""

  def annotated(namespace: Mapping[str, Any]) -> list[tuple[str, types.FunctionType]]:
    functions = [(name, value) for name, value in namespace.items() if isinstance(value, types.FunctionType)]
    return [(name, f) for name, f in functions if f.__module__ == module.__name__ and f.__annotations__]

  for value in vars(module).values():
    if isinstance(value, type) and value.__module__ == module.__name__:
      for name, method in annotated(vars(value)):
        if not name.startswith("__"):
          setattr(value, name, _check(method))
  return {id(function): (function, _check(function)) for _, function in annotated(vars(module))}


def _check(function: types.FunctionType) -> types.FunctionType:
  return jaxtyping.jaxtyped(function, typechecker=_beartype)
