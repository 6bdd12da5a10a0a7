"""Episodes of a run that are kept as text, for the report to show some of them."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from sao_jax.episode import Trajectory
from sao_jax.report.metrics import drop_lines_after
from sao_jax.report.page import EPISODES_FILE, append_episode


class EpisodeSamples:
  """Keeps an episode of the first step, of each third of the phase, of each step that is saved, and of the last one."""

  def __init__(
    self,
    workdir: pathlib.Path,
    phase: str,
    tokenizer: Any,
    *,
    steps: int,
    every: int,
    restored_step: int | None,
    writes: bool = True,
  ):
    """Drops the episodes of this phase beyond `restored_step`, all of them for None.

    Args:
      workdir: the run's folder.
      phase: name of the phase.
      tokenizer: turns ids into text.
      steps: train steps of the phase.
      every: steps between two checkpoints.
      restored_step: step of the checkpoint that the phase goes on from; None begins it.
      writes: False in the other processes of a run, which leave the file to the first one that samples.
    """
    self._workdir, self._phase, self._tokenizer = workdir, phase, tokenizer
    self._periods = (every, max(1, steps // 3))
    self._last: tuple[int, Trajectory] | None = None
    self._writes = writes
    if writes:
      drop_lines_after(workdir / EPISODES_FILE, phase, restored_step)

  def after(self, step: int, trajectories: Sequence[Trajectory]) -> None:
    """Offers the first episode of `step`; keeps it if one is due. There is none in a process that only learns."""
    self._last = (step, trajectories[0]) if trajectories else None
    if step == 1 or any(step % period == 0 for period in self._periods):
      self.finish()

  def finish(self) -> None:
    """Keeps the episode that was offered last, unless it is kept already."""
    if self._last is not None:
      self.keep(*self._last)
    self._last = None

  def keep(self, step: int, trajectory: Trajectory) -> None:
    """Appends an episode to the record."""
    if not self._writes:
      return
    segments = episode_segments(trajectory, self._tokenizer)
    append_episode(self._workdir, self._phase, step, trajectory.reward, trajectory.status.value, segments)


def episode_segments(trajectory: Trajectory, tokenizer: Any) -> list[tuple[str, str]]:
  """Turns an episode into text: (kind, text) pieces in order, kind "prompt", "action" or "observation"."""
  segments: list[tuple[str, str]] = []
  mask = trajectory.action_mask
  boundaries = [0, *(int(i) for i in (mask[1:] != mask[:-1]).nonzero()[0] + 1), len(mask)]
  turn_starts = {int(start) for start in trajectory.turn_starts}

  for start, end in zip(boundaries, boundaries[1:]):
    # Two turns without an observation between them are two actions.
    cuts = [start, *sorted(turn for turn in turn_starts if start < turn < end), end]
    for low, high in zip(cuts, cuts[1:]):
      kind = "action" if mask[low] else ("prompt" if low == 0 else "observation")
      segments.append((kind, tokenizer.decode(trajectory.token_ids[low:high])))
  return segments
