"""Which leaves of a parameter tree train. The frozen ones are an explicit list of names; nothing matches by pattern.

Gradients and optimiser states are flat dicts {"moe_layers/moe/up": leaf, ...} of the trainable leaves only, so a frozen
leaf has no gradient, no weight decay and no optimiser state, and stays the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax

from sao_jax.errors import ConfigError
from sao_jax.types import PyTree


def leaf_name(path: tuple) -> str:
  """The name of a leaf: its dict keys joined by "/"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def trainable_leaves(params: PyTree, frozen_paths: frozenset[str] = frozenset()) -> dict[str, jax.Array]:
  """The leaves that train, by name. ConfigError if a name to freeze is not in the tree or nothing is left to train."""
  leaves = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
  unknown = sorted(frozen_paths - leaves.keys())
  if unknown:
    raise ConfigError(
      "frozen_value_paths",
      f"{', '.join(unknown)}: no such parameters.",
      f"Name leaves of the tree, which has {', '.join(sorted(leaves))}.",
    )
  if not leaves.keys() - frozen_paths:
    raise ConfigError("frozen_value_paths", "Every parameter is frozen.", "Leave at least one to train.")
  return {name: leaf for name, leaf in leaves.items() if name not in frozen_paths}


def replace_leaves(params: PyTree, leaves: Mapping[str, jax.Array]) -> PyTree:
  """The tree with the named leaves replaced; the others are taken from `params` as they are."""
  return jax.tree_util.tree_map_with_path(lambda path, leaf: leaves.get(leaf_name(path), leaf), params)
