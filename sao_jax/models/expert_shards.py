"""Experts over a mesh: who holds which, how their weights are gathered, and how tokens find them.

Forward and backward are written out as two programs of one device each (`shard_map`), so that the partitioner has
nothing to decide: weights are gathered in the dtype of the activations, a layer at a time and again for the backward
pass, and their gradients leave in fp32 as reduce-scatters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from sao_jax.models.expert_buffer import buffer_rows, buffered_experts, buffered_gradient
from sao_jax.models.expert_dispatch import Group, dispatch, dispatch_pays
from sao_jax.models.experts import EXPERT_WEIGHTS, ExpertWeights, count_experts, expert_feed_forward, lives_here
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.staged_gather import Stage, gather, scatter_sum, stages

EMBED_AXIS = {"gate": -2, "up": -2, "down": -1}  # the dimension "expert_embed" of the weights
PART_BYTES = 2**30  # of the rows of experts that are laid out at a time


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sharded_experts(
  layout: Layout,
  implementation: str,
  params: ExpertWeights,
  x: Float[Array, "B T D"],
  weights: Float[Array, "B T k"],
  experts: Int[Array, "B T k"],
) -> tuple[Float[Array, "B T D"], Int[Array, "B T"]]:
  """The sum over the experts of every token, and how many were computed; exact and dropless for any routing.

  Every device gathers the tokens of its "expert" group and computes the experts it holds, their width split over
  "tensor"; the partial sums are added and scattered back. Where that axis is large, tokens travel to the devices of
  their experts instead, see `dispatch_pays`. With other rules: of the mesh axes that split the experts or
  their width, those that also split the tokens gather and scatter them, and the sums are added over the others.
  """
  return apply_sharded(layout, implementation, params, x, weights, experts)


def apply_sharded(
  layout: Layout,
  implementation: str,
  params: ExpertWeights,
  x: Float[Array, "B T D"],
  weights: Float[Array, "B T k"],
  experts: Int[Array, "B T k"],
  layer: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B T D"], Int[Array, "B T"]]:
  """`sharded_experts` without a gradient; with `layer`, `params` are those of all layers, see `expert_feed_forward`."""
  axes = _axes(layout)
  tokens, counts = layout.spec("batch", "sequence", None), layout.spec("batch", "sequence")

  def compute(
    params: ExpertWeights, layer: jax.Array | None, x: jax.Array, weights: jax.Array, experts: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    num_experts, shape = count_experts(params), x.shape
    params = {name: _gather_weight(params[name], name, axes, x.dtype) for name in EXPERT_WEIGHTS}
    number = number_of_parts(x, experts, layout)
    rows, travellers = _rows(experts, number, layout), _travellers(experts, number, layout)

    # The sum over the experts here; ids count from the first of them.
    def run(ids: jax.Array, x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
      if rows < ids.size:
        out, computed = buffered_experts(params, x, weights, ids, rows=rows, implementation=implementation, layer=layer)
      else:
        out = expert_feed_forward(params, x, weights, ids, implementation=implementation, layer=layer)
        computed = jnp.sum(lives_here(ids, num_experts), axis=-1, dtype=jnp.int32)
      return out, computed[:, None]

    # The sum over all experts, for some of the tokens of this device.
    def of_tokens(_: None, x: jax.Array, weights: jax.Array, experts: jax.Array) -> tuple[None, tuple]:
      if travellers is not None:
        run_received = lambda _, *received: (None, run(*received))
        sums = dispatch(run_received, None, experts, (x, weights), num_experts=num_experts, group=travellers)[1]
        return None, tuple(jax.lax.psum(part, axes.summed) for part in sums)
      x, weights, experts = (_gather_tokens(array, axes) for array in (x, weights, experts))
      first = jax.lax.axis_index(axes.expert) * num_experts
      return None, tuple(_add_up(part, axes) for part in run(experts - first, x, weights))

    _, (out, computed) = _in_parts(of_tokens, number, None, x, weights, experts)
    return out.reshape(shape), computed.reshape(shape[:2]) // layout.shards("mlp")

  specs = _weight_specs(layout, stacked=layer is not None)
  shards = _on_every_device(compute, layout, (specs, PartitionSpec(), tokens, tokens, tokens), (tokens, counts))
  return shards({name: params[name] for name in EXPERT_WEIGHTS}, layer, x, weights, experts)


def _forward(layout: Layout, implementation: str, *operands: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
  return apply_sharded(layout, implementation, *operands), operands


def _backward(layout: Layout, implementation: str, operands: Any, out_grads: Any) -> tuple[Any, ...]:
  """The gradients of weights and tokens; nothing was stored, weights and tokens are gathered again."""
  axes = _axes(layout)
  tokens = layout.spec("batch", "sequence", None)

  def compute(
    params: ExpertWeights, x: jax.Array, weights: jax.Array, experts: jax.Array, out_grad: jax.Array
  ) -> tuple[ExpertWeights, jax.Array, jax.Array]:
    dtypes, num_experts, shape = {name: p.dtype for name, p in params.items()}, count_experts(params), x.shape[:2]
    params = {name: _gather_weight(params[name], name, axes, x.dtype) for name in EXPERT_WEIGHTS}
    number = number_of_parts(x, experts, layout)
    rows, travellers = _rows(experts, number, layout), _travellers(experts, number, layout)

    # The gradients through the experts here; those of weights join the ones so far.
    def run(
      so_far: ExpertWeights | None, ids: jax.Array, x: jax.Array, weights: jax.Array, out_grad: jax.Array
    ) -> tuple[ExpertWeights, tuple[jax.Array, ...]]:
      if rows < ids.size:
        params_grad, *rest = buffered_gradient(
          params, x, weights, ids, out_grad, so_far, rows=rows, implementation=implementation
        )
      else:
        of_these = functools.partial(expert_feed_forward, experts=ids, implementation=implementation)
        params_grad, *rest = jax.vjp(of_these, params, x, weights)[1](out_grad)
        if so_far is not None:
          params_grad = jax.tree.map(lambda total, grad: total + grad.astype(jnp.float32), so_far, params_grad)
      return params_grad, tuple(rest)

    # The gradients through all experts, for some of the tokens of this device.
    def of_tokens(so_far: ExpertWeights | None, *part: jax.Array) -> tuple[ExpertWeights, tuple[jax.Array, ...]]:
      x, weights, experts, out_grad = part
      if travellers is not None:
        params_grad, sums = dispatch(
          run, so_far, experts, (x, weights, out_grad), num_experts=num_experts, group=travellers
        )
        return params_grad, tuple(jax.lax.psum(grad, axes.summed) for grad in sums)
      x, weights, experts, out_grad = (_gather_tokens(array, axes) for array in part)
      first = jax.lax.axis_index(axes.expert) * num_experts
      params_grad, rest = run(so_far, experts - first, x, weights, out_grad)
      return params_grad, tuple(_add_up(grad, axes) for grad in rest)

    in_rounds = number > 1 or travellers is not None
    zeros = {name: jnp.zeros(params[name].shape, jnp.float32) for name in params} if in_rounds else None
    params_grad, rest = _in_parts(of_tokens, number, zeros, x, weights, experts, out_grad)
    params_grad = {
      name: _scatter_gradient(grad, name, axes, layout).astype(dtypes[name]) for name, grad in params_grad.items()
    }
    x_grad, weights_grad = (grad.reshape(*shape, -1) for grad in rest)
    return params_grad, x_grad, weights_grad

  params, *arrays = operands
  specs = _weight_specs(layout)
  shards = _on_every_device(compute, layout, (specs, *[tokens] * 4), (specs, tokens, tokens))
  return *shards({name: params[name] for name in EXPERT_WEIGHTS}, *arrays, out_grads[0]), None


sharded_experts.defvjp(_forward, _backward)


def number_of_parts(x: Float[Array, "B T D"], experts: Int[Array, "B T k"], layout: Layout) -> int:
  """The equal parts, a power of two, in which a device's tokens are computed: so many that the rows of one are small.

  Weights are gathered once for all parts, and parts are made no smaller than they must be: where an expert has few
  rows, a kernel that takes whole tiles wastes much of them.
  """
  tokens, parts = x.shape[0] * x.shape[1], 1
  row_bytes = x.shape[2] * x.dtype.itemsize
  while _rows(experts, parts, layout) * row_bytes > PART_BYTES and tokens % (2 * parts) == 0:
    parts *= 2
  return parts


def _rows(experts: Int[Array, "B T k"], parts: int, layout: Layout) -> int:
  """The rows of a buffer, for one of so many parts of this device's tokens and of the others in its group."""
  group = math.prod(layout.mesh.shape[axis] for axis in _axes(layout).gathered)
  tokens = experts.shape[0] * experts.shape[1] // parts
  return buffer_rows(tokens * group * experts.shape[2], layout.shards("expert"))


def _travellers(experts: Int[Array, "B T k"], parts: int, layout: Layout) -> Group | None:
  """The devices among which tokens travel to their experts; None where each gathers the tokens of all.

  Few pairs are gathered, since it takes one step, and so are tokens that are split by the width of experts as well.
  """
  mesh, axes, devices = layout.mesh, _axes(layout), layout.shards("expert")
  along = tuple(axis for axis in axes.expert if mesh.shape[axis] > 1)
  few = _rows(experts, parts, layout) == experts.size // parts * devices
  if few or along != axes.gathered or not dispatch_pays(devices, experts.shape[2]):
    return None
  return Group(along, devices, mesh.axis_names, layout.platform)


def _in_parts(function: Callable[..., tuple[Any, Any]], number: int, carry: Any, *arrays: jax.Array) -> tuple[Any, Any]:
  """`function` (carry, *parts) -> (carry, results) over `number` parts of the tokens of arrays [B, T, ...].

  Parts and results have the tokens in front, [tokens, ...].
  """
  flat = tuple(array.reshape(-1, array.shape[-1]) for array in arrays)
  if number == 1:
    return function(carry, *flat)
  split = tuple(array.reshape(number, -1, array.shape[-1]) for array in flat)
  carry, results = jax.lax.scan(lambda carry, parts: function(carry, *parts), carry, split)
  return carry, jax.tree.map(lambda result: result.reshape(-1, *result.shape[2:]), results)


class _Axes(NamedTuple):
  """Mesh axes by what is done over them, those of one device left out.

  Attributes:
    expert: all axes that split the experts.
    gathered: they split experts or widths, and tokens too: tokens are gathered, sums scattered.
    summed: they split experts or widths, but no tokens: sums are added.
    embed: the stages in which the model dimension of weights is gathered.
    replicas: they split tokens, but no weights: gradients are added.
  """

  expert: tuple[str, ...]
  gathered: tuple[str, ...]
  summed: tuple[str, ...]
  embed: tuple[Stage, ...]
  replicas: tuple[str, ...]


def _axes(layout: Layout) -> _Axes:
  rules, shape = layout.rules, layout.mesh.shape
  several = lambda *names: tuple(axis for name in names for axis in rules.mesh_axes(name) if shape[axis] > 1)
  tokens, partial, embed = several("batch", "sequence"), several("expert", "mlp"), several("expert_embed")
  return _Axes(
    expert=rules.mesh_axes("expert"),
    gathered=tuple(axis for axis in partial if axis in tokens),
    summed=tuple(axis for axis in partial if axis not in tokens),
    embed=stages(layout.mesh, embed),
    replicas=tuple(axis for axis in tokens if axis not in partial + embed),
  )


def _weight_specs(layout: Layout, stacked: bool = False) -> dict[str, PartitionSpec]:
  """The places of the weights: of a layer, or of a stack of layers."""
  front = ("layers",) if stacked else ()
  inward = layout.spec(*front, "expert", "expert_embed", "mlp", name="gate")
  return {"gate": inward, "up": inward, "down": layout.spec(*front, "expert", "mlp", "expert_embed", name="down")}


def _on_every_device(compute: Callable, layout: Layout, in_specs: Any, out_specs: Any) -> Callable:
  # A Pallas kernel does not say over which axes its result varies.
  return jax.shard_map(compute, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _gather_weight(weight: jax.Array, name: str, axes: _Axes, dtype: Any) -> jax.Array:
  """The whole model dimension, in the dtype of the activations."""
  return gather(weight.astype(dtype), axes.embed, weight.ndim + EMBED_AXIS[name])


def _scatter_gradient(grad: jax.Array, name: str, axes: _Axes, layout: Layout) -> jax.Array:
  """This device's part of the sum over all tokens, in fp32."""
  total = scatter_sum(grad.astype(jnp.float32), axes.embed, grad.ndim + EMBED_AXIS[name])

  # Devices that hold the same tokens have added the same number several times.
  rules, shape = layout.rules, layout.mesh.shape
  tokens = rules.mesh_axes("batch") + rules.mesh_axes("sequence")
  copies = math.prod(shape[axis] for axis in rules.mesh_axes("expert_embed") if axis not in tokens)
  return jax.lax.psum(total, axes.replicas) / copies


def _gather_tokens(array: jax.Array, axes: _Axes) -> jax.Array:
  """[tokens of this device's group, ...] of those of this device."""
  return jax.lax.all_gather(array, axes.gathered, axis=0, tiled=True)


def _add_up(part: jax.Array, axes: _Axes) -> jax.Array:
  """The sum over the devices of a group, of this device's tokens."""
  return jax.lax.psum_scatter(jax.lax.psum(part, axes.summed), axes.gathered, scatter_dimension=0, tiled=True)
