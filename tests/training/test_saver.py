"""Nothing is saved in the middle of a step; a failure between steps saves what was trained."""

from __future__ import annotations

import contextlib
import errno
import types

import pytest
from toys.shared_store import SharedStore

from sao_jax.checkpoints.checkpointer import CheckpointFailure
from sao_jax.parallel.agreement import Processes
from sao_jax.training.phases import Phase, Start
from sao_jax.training.saver import Diverged, Saver


class FakeCheckpointer:
  """Keeps what it is given."""

  def __init__(self):
    self.saved, self.waits, self.fails = [], 0, False

  def due(self, step):
    return step % 2 == 0

  def save(self, step, state, host_state, turn):
    with turn():
      pass
    self.saved.append((step, state, host_state["policy_version"]))

  def last_good(self):
    return f"the last good checkpoint is that of step {self.saved[-1][0]}"

  def wait(self):
    self.waits += 1
    if self.fails:
      raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def saver():
  rollouts = types.SimpleNamespace(state_dict=lambda: ({}, {}))
  log = types.SimpleNamespace(flush=lambda: None, skipped_in_a_row=0, diverged=False)
  return Saver(FakeCheckpointer(), Phase("train", critic_steps=1, policy_steps=9), rollouts, log, Start(0, None))


def test_a_save_has_its_turn(saver):
  turns = []
  saver._turn = lambda: contextlib.nullcontext(turns.append("save"))
  saver.end_step(2, "second")
  saver.after(2)
  assert turns == ["save"]
  saver.save()
  assert turns == ["save", "save"]


@pytest.mark.parametrize("failure, saves", [(ValueError, True), (KeyboardInterrupt, False)])
def test_a_failure_between_steps_saves_the_last_one(saver, failure, saves):
  with pytest.raises(failure), saver:
    saver.end_step(3, "third")
    raise failure
  assert saver._checkpointer.saved == [(3, "third", 2)] * saves and saver._checkpointer.waits == saves


@pytest.mark.parametrize("full", [False, True])
def test_a_save_is_claimed_once_it_has_happened(saver, monkeypatch, caplog, full):
  """The disk fills up in the background: the save begins, and its end never comes."""
  monkeypatch.setattr(saver._checkpointer, "fails", full)
  with pytest.raises(ValueError, match="what failed first"), saver:
    saver.end_step(6, "sixth")
    raise ValueError("what failed first")
  assert caplog.messages[-1].startswith("Something failed")
  assert ("is saved: step 6" in caplog.text) == (not full)
  assert ("up to step 6 could not be saved" in caplog.text and "No space left" in caplog.text) == full


def test_processes_do_not_save_together_once_a_save_has_failed_in_one(saver, monkeypatch):
  """The others may wait for it in that save."""
  monkeypatch.setattr(saver, "_processes", Processes(1, 2, SharedStore()))
  with pytest.raises(CheckpointFailure), saver:
    saver.end_step(3, "third")
    raise CheckpointFailure("the disk is full")
  assert not saver._checkpointer.saved and not saver._processes._store.entries


def test_a_failure_within_a_step_saves_nothing(saver):
  with pytest.raises(ValueError), saver:
    saver.end_step(3, "third")
    saver.begin_step()
    raise ValueError
  assert not saver._checkpointer.saved


def test_steps_that_are_skipped_are_not_saved_and_too_many_end_the_run(saver, caplog):
  """The newest checkpoint stays the last good one, however many steps are skipped and whatever ends the run."""

  def after(step, skipped, diverged=False):
    saver._log.skipped_in_a_row, saver._log.diverged = skipped, diverged
    saver.end_step(step, f"state {step}")
    saver.after(step)

  with pytest.raises(Diverged, match="of 3 steps in a row were skipped.*of step 2.*same command again"), saver:
    after(2, skipped=0)
    after(4, skipped=1)
    assert "The updates of the last 1 steps were skipped, and these steps are not saved" in caplog.text
    after(5, skipped=3, diverged=True)
  assert saver._checkpointer.saved == [(2, "state 2", 1)] and "is saved" not in caplog.text
  assert not saver.save() and saver.save(ended=True)  # an interruption; the end of the phase
  assert saver._checkpointer.saved[1:] == [(5, "state 5", 4)]


def test_a_checkpoint_is_made_when_it_is_due(saver):
  with saver:
    for step in (1, 2, 3):
      saver.begin_step()
      saver.end_step(step, f"state {step}")
      saver.after(step)
  assert saver._checkpointer.saved == [(2, "state 2", 1)] and saver._checkpointer.waits == 0
