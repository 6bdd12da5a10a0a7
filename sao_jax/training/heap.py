"""Keeps the garbage collector from stopping every thread of a long run for a fifth of a second now and then."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
  """What exists now, some hundred thousand objects of jax alone, is looked at by no collection until the end.

  A full collection walks all objects and lets no thread run meanwhile: neither the event loop of the rollouts nor the
  sampler's thread. Garbage made from now on is collected as ever.
  """
  gc.collect()
  gc.freeze()
  try:
    yield
  finally:
    gc.unfreeze()
