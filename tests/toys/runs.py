"""Whole runs: interrupted on purpose, and compared."""

from __future__ import annotations

import contextlib
import itertools

import jax
import numpy as np
import pytest

from sao_jax.training.rollouts import Rollouts


def assert_identical(a, b):
  paths = jax.tree_util.tree_leaves_with_path(jax.device_get(a))
  for (path, x), y in zip(paths, jax.tree.leaves(jax.device_get(b)), strict=True):
    np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


@contextlib.contextmanager
def interrupted_after(steps):
  """Training is asked to stop as it waits for the batch after so many steps."""
  calls, take = itertools.count(), Rollouts.take

  def take_and_stop(rollouts, version):
    rollouts.interrupt.requested = next(calls) == steps
    return take(rollouts, version)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Rollouts, "take", take_and_stop)
    yield
