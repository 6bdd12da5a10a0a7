"""The consumed batches, kept on disk in the order of train steps: a finished run can be replayed (see `replay`)."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from sao_jax.checkpoints.host_state import decode, encode
from sao_jax.episode import Trajectory
from sao_jax.parallel.process import data_process_index
from sao_jax.rollout.serialization import trajectories_from_state, trajectories_to_state


class Record:
  """One archive per train step in `<workdir>/consumed/<phase>/`; numbers and text only, nothing is pickled."""

  def __init__(self, workdir: str | os.PathLike, phase: str):
    self.directory = pathlib.Path(workdir) / "consumed" / phase

  def write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
    """Keeps what led to `step`; a step that a resumed run repeats replaces what it left before."""
    records, arrays = trajectories_to_state(list(trajectories))
    self.directory.mkdir(parents=True, exist_ok=True)
    path = self._path(step)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(encode({"trajectories": records, "arrays": arrays}))
    os.replace(unfinished, path)  # whole or not at all

  def read(self, step: int) -> list[Trajectory]:
    """Returns the trajectories that `write` was given for `step`, bit for bit.

    Raises:
      FileNotFoundError: nothing was kept.
      ValueError: the file is damaged.
    """
    state = decode(self._path(step).read_bytes())
    return trajectories_from_state(state["trajectories"], state["arrays"])

  def forget_after(self, step: int) -> None:
    """Removes what was kept of later steps: a run that goes on from `step` makes them anew."""
    for path in self.directory.glob("*.npz"):
      if int(path.name.split(".")[0]) > step:
        path.unlink()

  def missing(self, steps: int) -> list[int]:
    """Returns those of the steps 1 ... `steps` that were not kept."""
    return [step for step in range(1, steps + 1) if not self._path(step).exists()]

  def _path(self, step: int) -> pathlib.Path:
    return self.directory / f"{step:08d}.process_{data_process_index()}.npz"
