"""The best checkpoints stay although newer ones come, by a measure that is known only after they were saved."""

from __future__ import annotations

import math

import jax.numpy as jnp

from sao_jax.checkpoints.checkpointer import Checkpointer
from sao_jax.checkpoints.retention import Best, best_steps, kept_steps

STATE = {"params": {"w": jnp.arange(3.0)}}


def run(folder, measures, count, known=None, keep=1, first=1):
  """Saves one step after the other, each measured behind its save; returns the steps that are left after each."""
  best, left = Best(count, dict(known or {})), []
  with Checkpointer(folder, keep=keep, every=1, best=best) as checkpointer:
    for step, success in enumerate(measures, first):
      checkpointer.save(step, STATE)
      checkpointer.wait()
      left.append(kept_steps(folder))
      best.success[step] = success
  return left


def test_the_best_stays_beside_the_newest_and_of_equals_the_earlier(tmp_path):
  assert run(tmp_path, [0.2, 0.5, 0.4, 0.5, 0.1], 1) == [[1], [1, 2], [2, 3], [2, 4], [2, 5]]


def test_several_best_ones_and_several_newest_ones(tmp_path):
  assert run(tmp_path, [0.6, 0.1, 0.7, 0.2, 0.3], 2, keep=2)[-1] == [1, 3, 4, 5]


def test_what_was_not_measured_is_never_the_best(tmp_path):
  assert run(tmp_path, [0.1, math.nan, math.nan, 0.0], 2)[-1] == [1, 4]
  assert best_steps([1, 2, 3], {2: math.nan, 9: 1.0}) == []


def test_a_run_that_goes_on_keeps_what_it_knew(tmp_path):
  known = {1: 0.9, 2: 0.1}
  run(tmp_path, known.values(), 1)
  assert run(tmp_path, [0.5, 0.6], 1, known, first=3)[-1] == [1, 4]
  assert kept_steps(tmp_path / "none") == []
