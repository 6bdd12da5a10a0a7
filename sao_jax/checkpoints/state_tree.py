"""The layout of a state inside a checkpoint: the item and the name of every leaf."""

from __future__ import annotations

from typing import Any

import jax

from sao_jax.errors import ConfigError
from sao_jax.parallel.params import path_name
from sao_jax.types import PyTree

NETWORKS = ("policy", "critic")
REST = "rest"  # optimiser states and counters


def places(state: PyTree) -> list[tuple[str, str]]:
  """Returns, for every leaf of `state` in flattening order, the item that holds it and its name there."""
  result = []
  for path, _ in jax.tree_util.tree_leaves_with_path(state):
    name = path_name(path)
    network, _, leaf = name.partition("/params/")
    if name.startswith("params/"):
      network, leaf = "policy", name.removeprefix("params/")
    result.append((network, leaf) if network in NETWORKS and leaf else (REST, name))
  return result


def split(state: PyTree) -> dict[str, dict[str, Any]]:
  """Returns the leaves of `state` by item and name."""
  items: dict[str, dict[str, Any]] = {name: {} for name in (*NETWORKS, REST)}
  for (item, name), leaf in zip(places(state), jax.tree.leaves(state)):
    items[item][name] = leaf
  return items


def check_same_leaves(
  stored: dict[str, Any], wanted: dict[str, Any], item: str, where: str, same_dtype: bool = True
) -> None:
  """Raises ConfigError naming the first leaf that is missing, unknown, or of another shape (or, if asked, dtype)."""

  def describe(leaves: dict[str, Any], name: str) -> str:
    leaf = leaves.get(name)
    return "no such array" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"

  def same(name: str) -> bool:
    if name not in stored or name not in wanted or tuple(stored[name].shape) != tuple(wanted[name].shape):
      return False
    return not same_dtype or stored[name].dtype == wanted[name].dtype

  # Wanted leaves first, then those that are stored but not wanted.
  different = [name for name in [*wanted, *(name for name in stored if name not in wanted)] if not same(name)]
  if not different:
    return

  # One leaf says enough: another model or optimiser differs in many.
  name = different[0]
  more = f" (and {len(different) - 1} more differ)" if len(different) > 1 else ""
  raise ConfigError(
    f"checkpoint {item}/{name}",
    f"expected {describe(wanted, name)}, found {describe(stored, name)}{more} in {where}.",
    _other_kind(stored, wanted, item)
    or "It was saved by a run with another model, optimiser, frozen set or "
    "algorithm.advantage: restore that run's --config, or use a new --workdir.",
  )


def _other_kind(stored: dict[str, Any], wanted: dict[str, Any], item: str) -> str:
  """Returns the remedy where a network has factors of LoRA on one side alone, or a base; "" elsewhere."""
  has = lambda leaves, prefix: any(name.startswith(prefix) for name in leaves)
  before, now = has(stored, "lora/"), has(wanted, "lora/")
  if item in NETWORKS and before != now:
    field = "model.lora.rank" if item == "policy" else "critic.lora.rank"
    kind = "as LoRA: set it as it was" if before else f"in full: set {field}=0"
    return f"{field} is another: this {item} has trained {kind}, or use a new --workdir."

  # Factors on both sides: a critic's base is its own, or the policy's.
  if item == "critic" and before and has(stored, "embed") != has(wanted, "embed"):
    beside = "that trains in full" if has(stored, "embed") else "with LoRA"
    return f"model.lora.rank is another: this critic stood beside a policy {beside}. Set it as it was."
  return ""


def nest(flat: dict[str, Any]) -> dict[str, Any]:
  """Turns {"a/b": leaf} into {"a": {"b": leaf}}."""
  nested: dict[str, Any] = {}
  for name, leaf in flat.items():
    *parents, last = name.split("/")
    node = nested
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = leaf
  return nested


def flatten(nested: PyTree) -> dict[str, Any]:
  """Returns the leaves of any pytree by their names joined with "/": for nested dicts the inverse of `nest`."""
  return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(nested)}
