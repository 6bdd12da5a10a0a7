"""The record of a run: its consumed batches on disk, in the order of train steps, for `replay` to train on again."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from sao_jax.checkpoints.host_state import decode, encode
from sao_jax.configuration.paths import located
from sao_jax.episode import Trajectory
from sao_jax.rollout.serialization import trajectories_from_state, trajectories_to_state


class Record:
  """The record of a phase: one archive per train step in `<workdir>/consumed/<phase>/`, numbers and text only.

  Nothing is pickled, so reading a record runs no code.
  """

  def __init__(self, workdir: str | os.PathLike, phase: str, share: int = 0):
    """`share`: of the data, that this process brings to every batch."""
    self.directory, self._share = located(workdir) / "consumed" / phase, share

  def write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
    """Records the batch of `step`; when a resumed run repeats the step, the new batch replaces the old one."""
    entries, arrays = trajectories_to_state(list(trajectories))
    self.directory.mkdir(parents=True, exist_ok=True)
    path = self._path(step)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(encode({"trajectories": entries, "arrays": arrays}))
    os.replace(unfinished, path)  # whole or not at all

  def read(self, step: int) -> list[Trajectory]:
    """Returns the trajectories that `write` was given for `step`, bit for bit.

    Raises:
      FileNotFoundError: the step was not recorded.
      ValueError: the file is damaged.
    """
    state = decode(self._path(step).read_bytes())
    return trajectories_from_state(state["trajectories"], state["arrays"])

  def forget_after(self, step: int) -> None:
    """Removes the later steps: a run that goes on from `step` makes them anew."""
    for path in self.directory.glob("*.npz"):
      if int(path.name.split(".")[0]) > step:
        path.unlink(missing_ok=True)  # every process of a run removes them

  def missing(self, steps: int) -> list[int]:
    """Returns those of the steps 1 ... `steps` that were not recorded."""
    return [step for step in range(1, steps + 1) if not self._path(step).exists()]

  def _path(self, step: int) -> pathlib.Path:
    return self.directory / f"{step:08d}.process_{self._share}.npz"
