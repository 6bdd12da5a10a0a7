"""Every annotation of the package evaluates, also where the type checker of the tests looks away."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
import typing

import jax.numpy as jnp
import jaxtyping
import pytest

import sao_jax
from sao_jax.algorithm.advantage import packed_returns
from sao_jax.algorithm.tokens import affine_scan
from sao_jax.algorithm.value_loss import HLGaussHead
from sao_jax.models.linear import rms_norm
from sao_jax.sampler import cache

MODULES = [name for _, name, _ in pkgutil.walk_packages(sao_jax.__path__, "sao_jax.")]


def annotated(module: types.ModuleType):
  """Functions, classes and methods that the module defines."""
  for value in vars(module).values():
    if getattr(value, "__module__", None) != module.__name__:
      continue
    if isinstance(value, type):
      yield value
      methods = (method for method in vars(value).values() if isinstance(method, types.FunctionType))
      # What dataclasses generate repeats the annotations of fields, which a base class in another module may have.
      yield from (method for method in methods if method.__code__.co_filename != "<string>")
    elif callable(value) and isinstance(inspect.unwrap(value), types.FunctionType):
      yield inspect.unwrap(value)


@pytest.mark.parametrize("name", MODULES)
def test_annotations_evaluate(name):
  module = importlib.import_module(name)
  for function in annotated(module):
    try:
      typing.get_type_hints(function, include_extras=True)
    except NameError as error:  # a name that is there for type checkers only
      assert any(error.name in line for line in inspect.getsource(module).split("if TYPE_CHECKING:")[1:])


def test_the_checks_are_on():
  """conftest.py puts them around the package: wrong shapes, dtypes and results are refused where they appear."""
  x, ids = jnp.ones(3, jnp.float32), jnp.ones(3, jnp.int32)
  for call in (
    lambda: affine_scan(x, jnp.ones((3, 1), jnp.float32)),
    lambda: packed_returns(x, x, x > 0, x, one_minus_lam=x),  # segment ids are integers
    lambda: rms_norm(x, jnp.ones(4, jnp.float32), 1e-6),
    lambda: cache.read_window("cache", ids, 1),
    lambda: HLGaussHead(11, 0.0, 1.0).losses(jnp.ones((3, 11), jnp.float32), x, ids),  # a mask is boolean
  ):
    with pytest.raises(jaxtyping.TypeCheckError):
      call()
