"""Items of a checkpoint that one process cannot read: all processes wait for each other at the end of reading.

An error there would leave the others waiting, in a collective that nobody can end. So it is a value until all have come
to that end, and is raised behind it.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import orbax.checkpoint as ocp


class Unreadable(NamedTuple):
  """In place of an item that cannot be read.

  Attributes:
    error: says why.
  """

  error: Exception


class StateHandler(ocp.StandardCheckpointHandler):
  """Orbax's handler of arrays, which returns `Unreadable` instead of raising an error while it reads."""

  def restore(self, directory: pathlib.Path, *arguments: Any, **options: Any) -> Any:
    """Reads the arrays of which this process holds a part; any part may be damaged, or fit no device."""
    try:
      return super().restore(directory, *arguments, **options)
    except Exception as error:
      if type(error) is not Exception:
        return Unreadable(error)
      # Of an array that it cannot read, with pages of its specification.
      found = str(error.__cause__ or error).partition(" See full TensorStore details")[0]
      damage = ValueError(f"an array is damaged: {found}")
      damage.__cause__ = error
      return Unreadable(damage)


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class StateSave(ocp.args.StandardSave):
  """The arrays to save."""


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class StateRestore(ocp.args.StandardRestore):
  """Shapes, dtypes and shardings of the arrays to read."""


def check_readable_items(items: Mapping[str, Any]) -> None:
  """Raises the error of the first item that could not be read."""
  for item in items.values():
    if isinstance(item, Unreadable):
      raise item.error
