"""Checkpoints that stay: the newest ones, and the best by a measure that may be known only after they were saved."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from sao_jax.parallel.agreement import all_processes


@dataclasses.dataclass(frozen=True)
class Best(checkpoint_managers.PreservationPolicy):
  """The best checkpoints, a policy of Orbax; one that was not measured is none of them.

  Attributes:
    count: how many.
    success: measure of each step, the greater the better; it grows while the run goes on.
  """

  count: int
  success: Mapping[int, float]

  def should_preserve(
    self,
    checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
    *,
    context: checkpoint_managers.PreservationContext,
  ) -> Sequence[bool]:
    """Tells of each checkpoint if it is among the best of them."""
    best = best_steps([each.step for each in checkpoints], self.success, self.count)
    return [each.step in best for each in checkpoints]


def best_steps(steps: Sequence[int], success: Mapping[int, float], count: int = 1) -> list[int]:
  """Returns the steps with the greatest success, the best first; of equals the earlier one comes first.

  >>> best_steps([10, 20, 30, 40], {10: 0.5, 20: 0.75, 30: 0.75, 50: 1.0}, 2)
  [20, 30]
  """
  measured = [step for step in steps if not math.isnan(success.get(step, math.nan))]
  return sorted(measured, key=lambda step: (-success[step], step))[:count]


def retention(keep: int | None, best: Best | None) -> checkpoint_managers.PreservationPolicy:
  """Makes Orbax's policy: the newest `keep` stay, None for all, and the best."""
  newest = checkpoint_managers.LatestN(keep)
  return newest if best is None else checkpoint_managers.AnyPreservationPolicy([newest, best])


def kept_steps(directory: pathlib.Path) -> list[int]:
  """Lists the steps of the complete checkpoints in a directory, ascending, as the first of all processes sees them."""
  found = sorted(ocp.utils.checkpoint_steps(directory)) if directory.is_dir() else []
  return all_processes().first("the checkpoints that there are", found)
