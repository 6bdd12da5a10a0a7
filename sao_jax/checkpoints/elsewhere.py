"""The arrays of a checkpoint, as a process takes part that holds none of them: one that only samples.

All processes of a run enter and leave a save or a restore together, as Orbax wants it; this one has nothing to write.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import future


class ElsewhereHandler(ocp.AsyncCheckpointHandler):
  """Stands in for Orbax's handler of arrays: writes and reads none, and knows what is stored."""

  async def async_save(self, directory: pathlib.Path, args: ElsewhereSave) -> list[future.Future]:
    """Leaves the arrays to the processes that hold them."""
    return []

  def save(self, directory: pathlib.Path, args: ElsewhereSave) -> None:
    """Leaves the arrays to the processes that hold them."""

  def restore(self, directory: pathlib.Path, args: ElsewhereRestore | None = None) -> None:
    """Reads nothing."""

  def metadata(self, directory: pathlib.Path) -> Any:
    """Reads names, shapes and dtypes of what is stored."""
    return ocp.StandardCheckpointHandler().metadata(directory)


@ocp.args.register_with_handler(ElsewhereHandler, for_save=True)
@dataclasses.dataclass
class ElsewhereSave(ocp.args.CheckpointArgs):
  """The arguments of saving: none."""


@ocp.args.register_with_handler(ElsewhereHandler, for_restore=True)
@dataclasses.dataclass
class ElsewhereRestore(ocp.args.CheckpointArgs):
  """The arguments of restoring: none."""
