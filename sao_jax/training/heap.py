"""Keeps the garbage collector from stopping every thread of a long run for a fifth of a second now and then."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
  """Hides all objects that exist now, some hundred thousand of jax alone, from the collector until the end.

  A full collection walks all objects and lets no thread run meanwhile: neither the event loop of the rollouts nor the
  sampler's thread. Objects made from now on are collected as ever.
  """
  gc.collect()
  gc.freeze()
  try:
    yield
  finally:
    gc.unfreeze()
