"""Train steps that are compiled before a run begins: compiling lasts minutes, for which all devices would wait."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Collection
from typing import Any

from sao_jax.interrupt import POLL, StopSignal
from sao_jax.learner.batches import abstract_rows
from sao_jax.learner.setup import Learner, abstract_state, make_step
from sao_jax.types import TrainState, TrajectoryBatch

COMPILING_STEPS = 2  # after so many steps of a process everything is compiled, for the rest of the run


class CompiledSteps:
  """The train step for every shape of batch, with and without the policy's update.

  Compiles in the background, several programs at a time, while the run starts up; a step waits for its own program.
  """

  def __init__(self, learner: Learner, update_policy: Collection[bool]):
    """Begins to compile and returns at once.

    Args:
      learner: the step is made from it.
      update_policy: the kinds of steps that the run needs: True for full ones, False for critic-only ones.
    """
    state, shapes = abstract_state(learner), list(abstract_rows(learner))
    steps = {kind: make_step(learner, update_policy=kind) for kind in sorted(update_policy)}  # those needed first

    def compile_step(kind: bool, rows: TrajectoryBatch):
      return steps[kind].lower(state, rows).compile()

    threads = concurrent.futures.ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compilation")
    self._threads, self._waits = threads, 0
    self._programs = {
      (kind, rows.token_ids.shape): threads.submit(compile_step, kind, rows) for kind in steps for rows in shapes
    }

  def __enter__(self) -> CompiledSteps:
    return self

  def __exit__(self, *unused: object) -> None:
    # What has not begun is given up: a process that was asked to end must not compile on for minutes.
    self._threads.shutdown(wait=False, cancel_futures=True)

  def wait(
    self,
    rows: TrajectoryBatch,
    *,
    update_policy: bool,
    interrupt: StopSignal,
    look: Callable[[], None] = lambda: None,
  ) -> bool:
    """Waits until the program for `rows` is compiled, before the third step of a process until all of them are.

    Returns:
      False when the process was asked to stop meanwhile.
    """
    self._waits += 1
    wanted = list(self._programs.values())
    if self._waits <= COMPILING_STEPS:
      wanted = [self._programs[update_policy, rows.token_ids.shape]]

    while concurrent.futures.wait(wanted, POLL).not_done:
      look()
      if interrupt.requested:
        return False
    return True

  def __call__(
    self, state: TrainState, rows: TrajectoryBatch, *, update_policy: bool
  ) -> tuple[TrainState, dict[str, Any]]:
    """Runs one train step; `state` is donated.

    Raises:
      KeyError: a kind or shape that was not compiled.
    """
    return self._programs[update_policy, rows.token_ids.shape].result()(state, rows)
