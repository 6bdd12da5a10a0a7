"""A trace of a few train steps: what devices and threads did, for xprof."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import jax
from absl import logging


class Profile(contextlib.AbstractContextManager):
  """Traces the train steps of `training.profile_steps`; every process writes what its own host and devices did.

  Example:
    with Profile(workdir / "profile", (10, 12)) as profile:
      for step in range(1, 100):
        with profile.step(step):
          state, metrics = train_step(state, batch)
  """

  def __init__(self, folder: pathlib.Path, first_and_last: tuple[int, ...]):
    """Args:
    folder: it is made once there is a trace.
    first_and_last: the steps, counted from 1; () for none.
    """
    self._folder, self._steps, self._runs = folder, first_and_last, False

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Goes around the dispatch of a train step: a trace ends with the dispatch of the step after its last one.

    By then the devices have done the last one, with all that followed it on the host.
    """
    if not self._steps:
      yield
      return

    # A run that is resumed between the two steps has a trace of the rest.
    first, last = self._steps
    if step > last:
      self._stop()
    elif first <= step and not self._runs:
      self._folder.mkdir(parents=True, exist_ok=True)
      jax.profiler.start_trace(str(self._folder))
      self._runs = True
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
      yield

  def __exit__(self, *_: object) -> None:
    self._stop()

  def _stop(self) -> None:
    if self._runs:
      jax.profiler.stop_trace()
      self._runs = False
      logging.info("A trace of steps %d to %d is in %s.", *self._steps, self._folder)
