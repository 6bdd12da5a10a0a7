"""Keeps the garbage collector from stopping every thread of a long run for a fifth of a second now and then."""

from __future__ import annotations

import contextlib
import gc
import resource
import time
from collections.abc import Iterator, Mapping
from typing import Any

GROWTH = 2.0  # of the peak of resident memory, after which everything is looked at again
SECONDS = 3600.0  # after which it is in any case
YOUNGEST, FULL = 0, 2  # generations of collections


@contextlib.contextmanager
def frozen_heap(*, growth: float = GROWTH, seconds: float = SECONDS) -> Iterator[None]:
  """Hides what lives for long from the garbage collector, which looks only at younger objects until the end.

  A full collection walks all objects and lets no thread run meanwhile: neither the event loops of rollouts and gateway
  nor the sampler's thread. There are some hundred thousand of jax alone, and hundreds for each episode in flight.
  So those that exist now, and later ones that are alive after a collection of more than the youngest, are hidden from
  the next ones. They are freed as ever once nothing refers to them. Those that refer to each other wait for a
  collection that looks at all, as the next full one does after memory has grown or time has passed: neither garbage
  nor a pause comes often.

  Args:
    growth: of the peak of resident memory since all was looked at, before it is again.
    seconds: the same in time.
  """
  collector = _Collector(growth, seconds)
  gc.collect()
  gc.freeze()
  gc.callbacks.append(collector)
  try:
    yield
  finally:
    gc.callbacks.remove(collector)
    gc.unfreeze()


class _Collector:
  """Called by Python before and after each collection, in whatever thread that is."""

  def __init__(self, growth: float, seconds: float):
    self._growth, self._seconds = growth, seconds
    self._settle()

  def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
    generation = info["generation"]
    if phase == "stop" and generation > YOUNGEST:
      gc.freeze()  # nothing is younger now than what this collection has left alive
    elif generation == FULL and (_peak() > self._peak * self._growth or time.monotonic() > self._due):
      gc.unfreeze()  # for the collection that begins now
      self._settle()

  def _settle(self) -> None:
    self._peak, self._due = _peak(), time.monotonic() + self._seconds


def _peak() -> int:
  """Returns the most memory that was ever resident, in the system's units."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
