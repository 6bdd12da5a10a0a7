"""Nothing in proportion to tokens is done under the lock of admission."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from toys.rollout_fakes import make_buffer, make_loop, make_trajectory, submit

TOKEN_ARRAYS = ("token_ids", "action_mask", "behavior_logprobs", "policy_version")


class Watched(np.ndarray):
  """An array that notes whenever it is read, or freed, under a lock."""

  lock, touched = None, []

  def __array_finalize__(self, source):
    self._note("view")

  def __array_ufunc__(self, ufunc, method, *inputs, **options):
    self._note(ufunc.__name__)
    return getattr(ufunc, method)(*(np.asarray(each) for each in inputs), **options)

  def __array_function__(self, function, types, args, options):
    self._note(function.__name__)
    return super().__array_function__(function, types, args, options)

  def __getitem__(self, index):
    self._note("getitem")
    return np.asarray(self)[index]

  def __del__(self):
    self._note("freed")

  def _note(self, what):
    if Watched.lock is not None and Watched.lock._is_owned():
      Watched.touched.append(what)


@pytest.fixture
def watch():
  """Watches the lock of a buffer that the test gives it; returns what was read under it."""

  def begin(buffer):
    Watched.lock, Watched.touched = buffer.ledger.lock, []
    return Watched.touched

  yield begin
  Watched.lock = None


def watched(rollout_id, **options):
  trajectory = make_trajectory(rollout_id, **options)
  arrays = {name: getattr(trajectory, name).view(Watched) for name in TOKEN_ARRAYS}
  return dataclasses.replace(trajectory, **arrays)


def test_the_watch_sees_what_it_is_for(watch):
  buffer = make_buffer()
  touched = watch(buffer)
  trajectory = watched(0)
  assert trajectory.num_sampled == 4 and not touched
  with buffer.ledger.lock:
    assert trajectory.num_sampled == 4
  assert touched


@pytest.mark.parametrize("staleness", ["drop", "mask"])
def test_putting_taking_dropping_training_saving_and_restoring(staleness, watch):
  loop = make_loop(batch_size=2, admission_staleness=9, max_staleness=2, staleness=staleness)
  buffer = loop.buffer
  touched = watch(buffer)
  for number, version in enumerate((0, 3, 3, [1, 3, 3, 3], 3, 3)):
    assert submit(buffer.ledger, number)
    buffer.put(watched(number, version=version))
  buffer.take(2, 3)
  loop.on_version(4)
  loop.stats()
  state = loop.state_dict()
  buffer.take(2, 4)
  loop.on_version(5)
  loop.on_version(9)  # what is left grows too old
  counters = buffer.ledger.counters()
  assert counters["dropped_stale"] > 0 and counters["trained"] + counters["masked"] == 4 and not touched

  again = make_loop(batch_size=2, admission_staleness=9, max_staleness=2, staleness=staleness)
  watch(again.buffer)
  again.load_state_dict(*state)
  assert len(again.buffer) > 0 and not Watched.touched
