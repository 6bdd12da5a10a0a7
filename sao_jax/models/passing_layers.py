"""A loop over layers that pass on what they have chosen, with a gradient that keeps every choice once.

`jax.lax.scan` would keep what each layer was passed, also where many layers in a row are passed the same. Here the
backward pass finds the input of every layer and the choice that it reads, and computes the rest again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float, Int

Layer = Callable[..., tuple[jax.Array, jax.Array, Any]]


def scan_passing(
  layer: Layer,
  replaces: tuple[bool, ...],
  x: Float[Array, "B T D"],
  passed: Int[Array, "B T k"],
  weights: Any,
  others: Any,
) -> tuple[Float[Array, "B T D"], Int[Array, "B T k"], Any]:
  """Runs the layers one after the other; returns the last hidden states, what is passed on, and the stacked reports.

  Gradients reach `x` and `weights`, but no report, and nothing that `layer` closes over.

  Args:
    layer: (x, passed, weights, others, chosen) -> (x, passed, report). With `chosen`, `passed` is what the layer itself
      passes on, and it need not choose again.
    replaces: for every layer, does it replace what it was passed?
    x: hidden states.
    passed: what the first layer is passed.
    weights: parameters of the layers, stacked.
    others: what else each layer is given, stacked: integers, or None.
  """
  places = np.cumsum(replaces).astype(np.int32)  # of what a layer passes on, among all that is passed
  first = jax.tree.map(lambda leaf: leaf[0], (weights, others))
  choosing, closed_over = _without_closure(functools.partial(layer, chosen=False), x, passed, *first)
  reading, also = _without_closure(functools.partial(layer, chosen=True), x, passed, *first)

  @jax.custom_vjp
  def run(
    consts: tuple[Any, Any], x: jax.Array, passed: jax.Array, weights: Any, others: Any
  ) -> tuple[jax.Array, jax.Array, Any]:
    def step(state: tuple[jax.Array, jax.Array], inputs: tuple[Any, Any]) -> tuple[tuple[jax.Array, jax.Array], Any]:
      x, passed, report = choosing(consts[0], *state, *inputs)
      return (x, passed), report

    (x, passed), reports = jax.lax.scan(step, (x, passed), (weights, others))
    return x, passed, reports

  def forward(
    consts: Any, x: Any, passed: Any, weights: Any, others: Any
  ) -> tuple[tuple[jax.Array, jax.Array, Any], Any]:
    if any(const.perturbed for const in jax.tree.leaves(consts, is_leaf=_is_primal)):
      raise ValueError("a layer closes over values that a gradient should reach: make them weights.")
    # Frozen weights get no gradient, and its products are not computed.
    trained = jax.tree.map(lambda each: each.value if each.perturbed else None, weights, is_leaf=_is_primal)
    consts, x, passed, weights, others = _values((consts, x, passed, weights, others))
    kept = jnp.zeros((places[-1] + 1, *passed.shape), passed.dtype).at[0].set(passed)

    def step(state: tuple[jax.Array, ...], inputs: tuple[Any, ...]) -> tuple[tuple[jax.Array, ...], Any]:
      x, passed, kept = state
      out, passed, report = choosing(consts[0], x, passed, *inputs[:2])
      kept = jax.lax.dynamic_update_index_in_dim(kept, passed, inputs[2], 0)
      return (out, passed, kept), (x, report)

    (x, passed, kept), (states, reports) = jax.lax.scan(step, (x, passed, kept), (weights, others, places))
    return (x, passed, reports), (consts[1], states, kept, trained, weights, others)

  def backward(saved: Any, grads: Any) -> tuple[None, jax.Array, None, Any, None]:
    consts, states, kept, trained, weights, others = saved

    def step(grad: jax.Array, inputs: tuple[Any, ...]) -> tuple[jax.Array, Any]:
      x, trained, weights, others, place = inputs
      # XLA could merge a loop of few layers with the forward pass, and keep all that is in between.
      x, grad = jax.lax.optimization_barrier((x, grad))

      def output(x: jax.Array, trained: Any) -> jax.Array:
        own = jax.tree.map(lambda new, old: old if new is None else new, trained, weights, is_leaf=lambda w: w is None)
        return reading(consts, x, kept[place], own, others)[0]

      return jax.vjp(output, x, trained)[1](grad)

    x_grad, weights_grad = jax.lax.scan(step, grads[0], (states, trained, weights, others, places), reverse=True)
    return None, x_grad, None, weights_grad, None

  run.defvjp(forward, backward, symbolic_zeros=True)
  return run((closed_over, also), x, passed, weights, others)


def _without_closure(function: Callable[..., Any], *example: Any) -> tuple[Callable[..., Any], list[Any]]:
  """(consts, *args) -> function(*args), for arguments like the examples, and the consts: what it closes over.

  A backward pass may be traced when its forward pass is long done; what that closed over is then out of reach.
  """
  traced, shapes = jax.make_jaxpr(function, return_shape=True)(*example)
  structure = jax.tree.structure(shapes)

  def run(consts: list[Any], *args: Any) -> Any:
    outputs = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, consts))(*jax.tree.leaves(args))
    return jax.tree.unflatten(structure, outputs)

  return run, traced.consts


def _is_primal(leaf: Any) -> bool:
  return hasattr(leaf, "perturbed")


def _values(tree: Any) -> Any:
  """The plain arrays of a tree of those that `jax.custom_vjp` wraps where it is asked for symbolic zeros."""
  return jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=_is_primal)
