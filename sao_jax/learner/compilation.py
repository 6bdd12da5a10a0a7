"""Train steps that are compiled before a run begins: compiling lasts minutes, for which all devices would wait."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Collection
from typing import Any

import jax
from absl import logging

from sao_jax.announce import announced
from sao_jax.interrupt import POLL, StopSignal
from sao_jax.learner.batches import abstract_rows
from sao_jax.learner.setup import Learner, abstract_state, make_step
from sao_jax.types import TrainState, TrajectoryBatch

COMPILING_STEPS = 2  # after so many steps of a process everything is compiled, for the rest of the run


class CompiledSteps:
  """The train step for every shape of batch, with and without the policy's update.

  Compiles in the background, several programs at a time, while the run starts up; a step waits for its own program.
  Those for more rows than are configured, and for trajectories in several rows, are compiled when the first such batch
  comes. A process that does not learn compiles nothing, and waits with the others.
  """

  def __init__(self, learner: Learner, update_policy: Collection[bool]):
    """Begins to compile and returns at once.

    Args:
      learner: the step is made from it.
      update_policy: the kinds of steps that the run needs: True for full ones, False for critic-only ones.
    """
    state, self._learns = abstract_state(learner), learner.learns

    def compile_step(kind: bool, rows: TrajectoryBatch) -> Any:
      return make_step(learner, update_policy=kind, rows=rows.token_ids.shape[0]).lower(state, rows).compile()

    self._threads = concurrent.futures.ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compilation")
    self._waits, self._kinds, self._compile = 0, frozenset(update_policy), compile_step
    self._processes, self._compiled_everywhere = learner.processes, set()
    shapes = list(abstract_rows(learner)) if self._learns else []
    self._programs = {
      _key(kind, rows): self._threads.submit(compile_step, kind, rows)
      for kind in sorted(self._kinds)  # those needed first
      for rows in shapes
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
      False for all processes when one was asked to stop meanwhile.
    """
    self._waits += 1
    own = [self._program(update_policy, rows)] if self._learns else []
    key = (_key(update_policy, rows), self._waits > COMPILING_STEPS)
    if key in self._compiled_everywhere:
      return True
    wanted = own if self._waits <= COMPILING_STEPS else list(self._programs.values())
    stopped = self._wait_for(wanted, interrupt, look)

    def look_here() -> None:
      look()
      _ = interrupt.requested  # tells the others of a stop that this process was asked for

    if self._processes.any("a stop while train steps compile", stopped, look_here):
      return False
    self._compiled_everywhere.add(key)
    return True

  def _wait_for(self, wanted: list[concurrent.futures.Future], interrupt: StopSignal, look: Callable[[], None]) -> bool:
    """Waits until all of these are compiled; True when the process was asked to stop before."""

    if not concurrent.futures.wait(wanted, 0.0).not_done:
      return False
    with announced(f"Compiling {len(wanted)} train steps" if len(wanted) > 1 else "Compiling the train step"):
      while concurrent.futures.wait(wanted, POLL).not_done:
        look()
        if interrupt.requested:
          return True
    return False

  def __call__(
    self, state: TrainState, rows: TrajectoryBatch, *, update_policy: bool
  ) -> tuple[TrainState, dict[str, Any]]:
    """Runs one train step; `state` is donated. Without a part in it, state and no metrics are returned.

    Raises:
      KeyError: a kind of step that the run does not need.
    """
    if not self._learns:
      return state, {}
    return self._program(update_policy, rows).result()(state, rows)

  def _program(self, kind: bool, rows: TrajectoryBatch) -> concurrent.futures.Future:
    """Returns the program for `rows`; begins to compile one that nobody expected."""
    key = _key(kind, rows)
    if key not in self._programs and kind in self._kinds:
      pieces = "" if rows.pieces is None else ", with trajectories in several of them"
      logging.info("The train step is compiled for a batch of %d rows of %d tokens%s.", *key[1], pieces)
      abstract = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
      self._programs[key] = self._threads.submit(self._compile, kind, jax.tree.map(abstract, rows))
    return self._programs[key]


def _key(kind: bool, rows: TrajectoryBatch) -> tuple[bool, tuple[int, ...], bool]:
  """Returns all that programs differ by: the kind of step, the shape of the rows, and whether any trajectory is cut."""
  return kind, rows.token_ids.shape, rows.pieces is not None
