"""Parameters declared once: from a tree of `ParamSpec` follow names, initial values, abstract trees (and shardings)."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
Params = dict[str, Any]
Specs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """One parameter.

  Attributes:
    shape: its shape.
    axes: the logical axis (a field of `AxisRules`) of each dimension, None where it is never sharded.
    initializer: "normal" (with `stddev`), "zeros", "ones", or a function (key, shape, dtype) -> array.
    dtype: the dtype of the stored parameter.
    stddev: the standard deviation of "normal".
    compute_dtype: the dtype that the model reads it in; None: that of its activations. Publishing keeps this precision,
      so that sampler and learner compute with the same numbers.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  initializer: str | Initializer = "normal"
  dtype: Any = "float32"
  stddev: float = 0.02
  compute_dtype: str | None = None

  def __post_init__(self):
    if len(self.shape) != len(self.axes):
      raise ValueError(f"a parameter of shape {self.shape} needs {len(self.shape)} axes, got {self.axes}")

  def initialize(self, key: jax.Array) -> jax.Array:
    """The initial value of this parameter."""
    dtype = jnp.dtype(self.dtype)
    if callable(self.initializer):
      return self.initializer(key, self.shape, dtype)
    if self.initializer == "zeros":
      return jnp.zeros(self.shape, dtype)
    if self.initializer == "ones":
      return jnp.ones(self.shape, dtype)
    if self.initializer == "normal":
      return (self.stddev * jax.random.normal(key, self.shape, jnp.float32)).astype(dtype)
    raise ValueError(f"unknown initializer {self.initializer!r}: normal, zeros, ones or a function")


def stack_specs(specs: Specs, count: int) -> Specs:
  """The same parameters for `count` layers, stacked along a new first axis "layers" (the one that is scanned)."""
  stack = lambda spec: dataclasses.replace(spec, shape=(count, *spec.shape), axes=("layers", *spec.axes))
  return jax.tree.map(stack, specs)


def path_name(path: tuple[Any, ...]) -> str:
  """The name of a leaf: its dict keys joined by "/", as in "moe_layers/attention/q"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def path_names(tree: Params) -> list[str]:
  """The names of all leaves, in flattening order."""
  return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def init_params(specs: Specs, key: jax.Array) -> Params:
  """Initial parameters. Each leaf's key depends on `key` and its own name only, not on the other leaves."""

  def init(path: tuple[Any, ...], spec: ParamSpec) -> jax.Array:
    digest = hashlib.sha256(path_name(path).encode()).digest()
    return spec.initialize(jax.random.fold_in(key, int.from_bytes(digest[:4], "little")))

  return jax.tree_util.tree_map_with_path(init, specs)


def abstract_params(specs: Specs) -> Params:
  """The tree of `jax.ShapeDtypeStruct`s."""
  return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)), specs)


def checksum(params: Params) -> str:
  """Returns 16 letters that tell these parameters from others, whatever devices they lie on.

  Every process calls it, with the same tree. A leaf enters by its name and the sum of its bits, modulo 2**32: a sum of
  integers depends on no order.
  """
  sums = jax.tree.map(lambda leaf: int(_sum_of_bits(leaf)), params)
  named = zip(path_names(params), jax.tree.leaves(sums), strict=True)
  return hashlib.sha256(repr([*named]).encode()).hexdigest()[:16]


@jax.jit
def _sum_of_bits(leaf: jax.Array) -> jax.Array:
  bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
  return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)


def count_params(specs: Specs) -> int:
  """Number of parameters of a tree of specs, or of arrays."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(specs))
