"""Train steps that are compiled before a run begins: the compiler takes minutes, for which all devices would wait."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Collection
from typing import Any

from sao_jax.training.batches import abstract_rows
from sao_jax.training.setup import Learner, abstract_state, make_step
from sao_jax.types import TrainState, TrajectoryBatch


class CompiledSteps:
  """The train step for every shape of batch, with and without the policy's update."""

  def __init__(self, learner: Learner, update_policy: Collection[bool]):
    """Compiles, several programs at a time.

    Args:
      learner: whose step it is.
      update_policy: which kinds of steps the run needs: True for full ones, False for critic-only ones.
    """
    state, shapes = abstract_state(learner), list(abstract_rows(learner))
    steps = {kind: make_step(learner, update_policy=kind) for kind in update_policy}

    def compile_step(kind: bool, rows: TrajectoryBatch):
      return steps[kind].lower(state, rows).compile()

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
      programs = {
        (kind, rows.token_ids.shape): threads.submit(compile_step, kind, rows) for kind in steps for rows in shapes
      }
    self._programs = {key: program.result() for key, program in programs.items()}

  def __call__(
    self, state: TrainState, rows: TrajectoryBatch, *, update_policy: bool
  ) -> tuple[TrainState, dict[str, Any]]:
    """One train step; `state` is donated.

    Raises:
      KeyError: a kind or shape that was not compiled.
    """
    return self._programs[update_policy, rows.token_ids.shape](state, rows)
