"""Admission: capacity, and the identity of the counters under any sequence of events."""

from __future__ import annotations

import json
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sao_jax.rollout.ledger import AdmissionControl, Place, check_identity
from sao_jax.rollout.outcomes import Outcome


def advance_to(admission: AdmissionControl, version: int, batch_size: int) -> None:
  for _ in range(version):
    for _ in range(batch_size):
      assert admission.submit()
    admission.move(Place.IN_FLIGHT, Place.BUFFERED, batch_size)
    admission.move(Place.BUFFERED, Place.IN_TRAINING, batch_size)
    admission.settle(Place.IN_TRAINING, Outcome.TRAINED, count=batch_size)


@pytest.mark.parametrize("version", [0, 5, 10, 50])
def test_capacity_after_a_restore_does_not_depend_on_the_version(version):
  admission = AdmissionControl(batch_size=16, staleness=2)
  advance_to(admission, version, 16)
  restored = AdmissionControl(batch_size=16, staleness=2)
  restored.load_state_dict(json.loads(json.dumps(admission.state_dict())))
  assert restored.capacity == 48
  for _ in range(5):
    assert restored.submit()
  assert restored.capacity == 43


@pytest.mark.parametrize("eta, batch_size", [(0, 1), (0, 4), (1, 3), (4, 2)])
def test_no_more_than_eta_plus_one_batches_are_under_way(eta, batch_size):
  admission = AdmissionControl(batch_size, eta)
  assert [admission.submit() for _ in range((eta + 1) * batch_size + 1)] == [True] * ((eta + 1) * batch_size) + [False]
  admission.move(Place.IN_FLIGHT, Place.BUFFERED, batch_size)
  assert not admission.submit()
  admission.move(Place.BUFFERED, Place.IN_TRAINING, batch_size)
  assert not admission.submit()  # a batch in training holds its capacity until its version is published
  admission.settle(Place.IN_TRAINING, Outcome.TRAINED, count=batch_size)
  assert admission.capacity == batch_size


def test_every_outcome_gives_its_capacity_back_and_says_so():
  admission = AdmissionControl(batch_size=1, staleness=0)
  freed = []
  admission.on_capacity = lambda: freed.append(admission.capacity)
  for outcome in Outcome:
    assert admission.submit() and not admission.submit()
    admission.settle(Place.IN_FLIGHT, outcome, "why")
  assert freed == [1] * len(Outcome)
  counters = admission.counters()
  assert counters["submitted"] == len(Outcome) == sum(counters[outcome.value] for outcome in Outcome)
  assert counters["filtered/why"] == 1


@given(st.lists(st.tuples(st.sampled_from([None, *Place]), st.sampled_from([*Place, *Outcome])), max_size=60))
def test_identity_under_any_sequence_of_events(events):
  admission = AdmissionControl(batch_size=3, staleness=1)
  for origin, destination in events:
    if origin is None:
      assert admission.submit() == (sum(admission.count(place) for place in Place) < 6)
    elif not admission.count(origin):
      with pytest.raises(RuntimeError):
        admission.move(origin, Place.BUFFERED)
    elif isinstance(destination, Place):
      admission.move(origin, destination)
    else:
      admission.settle(origin, destination, "reason")
    check_identity(admission.counters())
    assert 0 <= admission.capacity <= 6


def test_identity_notices_a_lost_rollout():
  counters = AdmissionControl(1, 0).counters()
  with pytest.raises(RuntimeError, match="submitted 1"):
    check_identity({**counters, "submitted": 1})


def test_state_saves_training_as_buffered_and_aborted_as_in_flight():
  admission = AdmissionControl(batch_size=4, staleness=0)
  for _ in range(4):
    admission.submit()
  admission.move(Place.IN_FLIGHT, Place.IN_TRAINING)
  admission.move(Place.IN_FLIGHT, Place.BUFFERED)
  admission.settle(Place.IN_FLIGHT, Outcome.ABORTED)
  restored = AdmissionControl(batch_size=4, staleness=0)
  restored.load_state_dict(admission.state_dict())
  counters = restored.counters()
  check_identity(counters)
  assert (counters["in_flight"], counters["buffered"], counters["in_training"], counters["aborted"]) == (2, 2, 0, 0)


def test_identity_under_threads():
  admission = AdmissionControl(batch_size=8, staleness=3)

  def work(outcome):
    for _ in range(500):
      if admission.submit():
        admission.settle(Place.IN_FLIGHT, outcome)

  threads = [threading.Thread(target=work, args=(outcome,)) for outcome in (Outcome.TRAINED, Outcome.ABORTED)]
  for thread in threads:
    thread.start()
  for _ in range(100):
    check_identity(admission.counters())
  for thread in threads:
    thread.join()
  assert admission.counters()["submitted"] == 1000
