"""Low-rank adaptation of a network (LoRA, arXiv 2106.09685): W + alpha / rank · A B; A and B train, W does not.

The sum is made layer by layer, before a layer runs, and whole for the sampler and for exports. Sampler and learner thus
multiply by the same sums: x W + s (x A) B rounds differently from x (W + s A B), and what differs at lag 0 eats
the trust region of the importance ratios. A matrix's sum costs as many operations as `rank` tokens that meet it; those
of all E experts as many as rank · E / k tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sao_jax.config import LoRAConfig
from sao_jax.models.attention import KINDS
from sao_jax.parallel.params import Params, ParamSpec, Specs

# The matrices of each target, and how many axes of each are inputs; a model has some of them.
TARGETS = {
  "attention": {f"attention/{name}": inputs for kind in KINDS for name, inputs in kind.matrices.items()},
  "mlp": {f"{part}/{name}": 1 for part in ("mlp", "moe", "moe/shared") for name in ("gate", "up", "down")},
}


def lora_specs(specs: Specs, config: LoRAConfig) -> Specs:
  """{"a": ..., "b": ..., "scale": []}: two trees with the target matrices of `specs` alone, and alpha / rank; all fp32.

  A matrix W [*stacked, *inputs, *outputs] gets A [*stacked, *inputs, rank], from N(0, 1 / inputs), and B [*stacked,
  rank, *outputs], which is 0, so that training starts from W. Stacked are layers, and experts. The scale, which never
  trains, is a parameter so that factors are never stored, nor read again, without it.
  """
  targets = {name: inputs for target in config.targets for name, inputs in TARGETS[target].items()}
  scale = lambda key, shape, dtype: jnp.full(shape, lora_scale(config), dtype)
  return {
    "a": {group: _select(specs[group], targets, _a, config.rank) for group in _groups(specs)},
    "b": {group: _select(specs[group], targets, _b, config.rank) for group in _groups(specs)},
    "scale": ParamSpec((), (), scale, compute_dtype="float32"),
  }


def lora_scale(config: LoRAConfig) -> float:
  """alpha / rank."""
  return config.alpha / config.rank


def lora_of(params: Params, group: str) -> Params:
  """Returns the factors {"a", "b"} of one stack of layers; empty trees if the parameters hold no "lora"."""
  if "lora" not in params:
    return {"a": {}, "b": {}}
  return {factor: params["lora"][factor][group] for factor in ("a", "b")}


def add_lora(params: Params, factors: Params, scale: Float[Array, ""] | None) -> Params:
  """`params`, of one layer or of a stack of layers, with every target matrix replaced by W + scale · A B.

  `factors` holds "a" and "b" of these parameters. Matrices with factors come back in fp32. If there are no factors,
  `params` is returned unchanged and `scale` is None.
  """

  def add(weight: Params | jax.Array, a: Params | jax.Array, b: Params | jax.Array) -> Params | jax.Array:
    if isinstance(weight, dict):
      return {name: add(leaf, a[name], b[name]) if name in a else leaf for name, leaf in weight.items()}
    return weight.astype(jnp.float32) + scale * _product(a, b, weight.ndim)

  return add(params, factors["a"], factors["b"])


def merge_lora(params: Params, *, keep_dtype: bool = False) -> Params:
  """Returns the same network without "lora": its factors are added to the matrices. Without factors, nothing changes.

  Changed matrices are fp32; `keep_dtype` rounds them to the dtype that they had.
  """
  if "lora" not in params:
    return params
  plain = {name: leaf for name, leaf in params.items() if name != "lora"}
  merged = add_lora(plain, params["lora"], params["lora"]["scale"])
  return jax.tree.map(lambda new, old: new.astype(old.dtype), merged, plain) if keep_dtype else merged


def widen_lora(factors: Params, given: Params) -> Params:
  """`factors` whose first ones become those of another tree, scale included: their product is that of `given`.

  Args:
    factors: as `lora_specs` makes them, where B is 0.
    given: of no higher rank, and of no matrices that `factors` does not adapt.
  """

  def lay(ours: Params | jax.Array, theirs: Params | jax.Array) -> Params | jax.Array:
    if isinstance(ours, dict):
      return {name: lay(leaf, theirs[name]) if name in theirs else leaf for name, leaf in ours.items()}
    return jax.lax.dynamic_update_slice(ours, theirs, (0,) * ours.ndim)

  b = jax.tree.map(lambda leaf: given["scale"] / factors["scale"] * leaf, given["b"])
  return {"a": lay(factors["a"], given["a"]), "b": lay(factors["b"], b), "scale": factors["scale"]}


def _product(a: Float[Array, "..."], b: Float[Array, "..."], ndim: int) -> Float[Array, "..."]:
  """A B, of `ndim` axes; whatever is stacked stands in front of both."""
  stacked = tuple(range(a.ndim + b.ndim - 2 - ndim))
  numbers = (((a.ndim - 1,), (len(stacked),)), (stacked, stacked))
  return jax.lax.dot_general(a, b, numbers, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _groups(specs: Specs) -> tuple[str, ...]:
  return tuple(name for name in ("dense_layers", "moe_layers") if name in specs)


def _select(
  specs: Specs, targets: Mapping[str, int], make: Callable[..., ParamSpec], rank: int, prefix: str = ""
) -> Specs:
  chosen = {}
  for name, spec in specs.items():
    path = f"{prefix}{name}"
    if isinstance(spec, dict):
      inside = _select(spec, targets, make, rank, f"{path}/")
      chosen |= {name: inside} if inside else {}
    elif path in targets:
      stacked = 1 + path.startswith("moe/") - path.startswith("moe/shared/")
      chosen[name] = make(spec, stacked, stacked + targets[path], rank)
  return chosen


def _a(spec: ParamSpec, stacked: int, outputs: int, rank: int) -> ParamSpec:
  """A, whose inputs are the axes `stacked` ... `outputs` of the matrix."""
  stddev = math.prod(spec.shape[stacked:outputs]) ** -0.5
  shape, axes = (*spec.shape[:outputs], rank), (*spec.axes[:outputs], None)
  return ParamSpec(shape, axes, stddev=stddev, compute_dtype="float32")


def _b(spec: ParamSpec, stacked: int, outputs: int, rank: int) -> ParamSpec:
  shape = (*spec.shape[:stacked], rank, *spec.shape[outputs:])
  axes = (*spec.axes[:stacked], None, *spec.axes[outputs:])
  return ParamSpec(shape, axes, "zeros", compute_dtype="float32")
