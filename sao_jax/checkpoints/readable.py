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

  async def async_save(self, directory: pathlib.Path, args: StateSave) -> Any:
    """Copies the arrays from the devices, and writes them in the background."""
    return await super().async_save(directory, args=ocp.args.StandardSave(args.state))

  def save(self, directory: pathlib.Path, args: StateSave) -> None:
    """Writes the arrays before it returns."""
    super().save(directory, args=ocp.args.StandardSave(args.state))

  def restore(self, directory: pathlib.Path, args: StateRestore | None = None) -> Any:
    """Reads the arrays of which this process holds a part; any part may be damaged, or fit no device."""
    try:
      return super().restore(directory, args=None if args is None else ocp.args.StandardRestore(args.abstract))
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
class StateSave(ocp.args.CheckpointArgs):
  """The arrays to save, a nested dict."""

  state: Any


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class StateRestore(ocp.args.CheckpointArgs):
  """Shapes, dtypes and shardings of the arrays to read."""

  abstract: Any


def check_readable_items(items: Mapping[str, Any]) -> None:
  """Raises the error of the first item that could not be read."""
  for item in items.values():
    if isinstance(item, Unreadable):
      raise item.error
