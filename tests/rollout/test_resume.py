"""Saving and going on: nothing lost, nothing doubled, the same rollouts under the same numbers."""

from __future__ import annotations

import io
import json
import pathlib
import threading
import time

import numpy as np
import pytest
from toys.rollout_fakes import FakePrompts, FakeSampler, Running, make_loop, train

from sao_jax.rollout import rollout_loop
from sao_jax.rollout.outcomes import check_identity
from sao_jax.rollout.serialization import trajectories_to_state

SINCE = ("cancelled", "steps", "seconds", "busy_seconds", "excluded_prompts")  # sums that states from then do not have


def through_storage(state, arrays):
  """JSON and npz without pickle."""
  file = io.BytesIO()
  np.savez(file, **arrays)
  file.seek(0)
  loaded = np.load(file, allow_pickle=False)
  return json.loads(json.dumps(state)), {name: loaded[name] for name in loaded.files}


def wait_until(condition) -> None:
  deadline = time.monotonic() + 20
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.001)


def collect(keys: list[int]):
  return lambda batch, version: keys.extend(trajectory.key.id for trajectory in batch)


@pytest.mark.parametrize("stop_first", [False, True])
@pytest.mark.parametrize("eta", [0, 2])
def test_prompts_in_flight_and_buffered_survive(eta, stop_first):
  # Odd rollouts hang in the first run, so that some are in flight and some buffered when the state is taken.
  first_sampler = FakeSampler(delay=lambda rollout_id: 3600.0 if rollout_id >= 4 and rollout_id % 2 else 0.0)
  first = make_loop(sampler=first_sampler, admission_staleness=eta, slots=6, prompts=FakePrompts(24))
  used: list[int] = []
  with Running(first):
    version = train(first, first_sampler, 1, inspect=collect(used))
    wait_until(lambda: len(first.buffer) >= (2 if eta == 0 else 4))
    state, arrays = first.state_dict()
  if stop_first:  # what stopping aborted is saved as in flight all the same
    assert first.stats()["aborted"] > 0
    state, arrays = first.state_dict()
  before = {rollout_id: key[1] for rollout_id, key, _ in state["intake"]["unfinished"]}
  assert before and all(rollout_id == number for rollout_id, number in before.items())

  sampler = FakeSampler(version=version)
  second = make_loop(sampler=sampler, admission_staleness=eta, slots=6, prompts=FakePrompts(24))
  second.load_state_dict(*through_storage(state, arrays))
  counters = second.stats()
  check_identity(counters)
  assert counters["in_flight"] == len(before) and counters["trained"] == 4
  assert counters["aborted"] == counters["in_training"] == 0
  with Running(second):
    train(second, sampler, 5, version=version, inspect=collect(used))
    stats = second.stats()
  assert sorted(used) == list(range(24))
  assert stats["submitted"] == stats["trained"] == 24 and stats["used"] == 24
  again = [request.rollout_id for request in sampler.requests[: len(before)]]
  assert again == sorted(before)


def test_synchronous_resume_equals_the_uninterrupted_run():
  def tokens(batches):
    return lambda batch, version: batches.append([trajectory.token_ids.tolist() for trajectory in batch])

  whole, parts = [], []
  sampler = FakeSampler()
  with Running(make_loop(sampler=sampler, admission_staleness=0)) as loop:
    train(loop, sampler, 4, inspect=tokens(whole))

  sampler = FakeSampler()
  with Running(make_loop(sampler=sampler, admission_staleness=0)) as loop:
    version = train(loop, sampler, 2, inspect=tokens(parts))
    state = through_storage(*loop.state_dict())
  sampler = FakeSampler(version=version)
  loop = make_loop(sampler=sampler, admission_staleness=0)
  loop.load_state_dict(*state)
  with Running(loop):
    train(loop, sampler, 2, version=version, inspect=tokens(parts))
  assert parts == whole


def test_a_step_that_had_not_finished_is_trained_again():
  sampler = FakeSampler()
  with Running(make_loop(sampler=sampler)) as loop:
    version = train(loop, sampler, 1)
    interrupted = loop.buffer.take(4, version, timeout=20)
    state = through_storage(*loop.state_dict())
  resumed = make_loop(sampler=FakeSampler(version=version))
  resumed.load_state_dict(*state)
  batch = resumed.buffer.take(4, version, timeout=20)
  for before, after in zip(interrupted, batch, strict=True):
    assert before.rollout_id == after.rollout_id
    np.testing.assert_array_equal(before.behavior_logprobs, after.behavior_logprobs)


@pytest.mark.parametrize("full", [False, True])
def test_progress_after_resuming_with_an_empty_or_a_full_buffer(full):
  sampler = FakeSampler(delay=lambda rollout_id: 0.0 if full or rollout_id < 4 else 3600.0)
  loop = make_loop(sampler=sampler)
  with Running(loop):
    if full:
      wait_until(lambda: len(loop.buffer) == 12)
      version = 0
    else:
      version = train(loop, sampler, 1)
      wait_until(lambda: loop.stats()["in_flight"] == 8)
    state = through_storage(*loop.state_dict())
  assert bool(state[1]) is full  # without trajectories there are no arrays at all
  sampler = FakeSampler(version=version)
  loop = make_loop(sampler=sampler)
  loop.load_state_dict(*state)
  assert loop.buffer.ledger.capacity == (0 if full else 4)
  with Running(loop):
    train(loop, sampler, 4, version=version)


def test_statistics_go_on():
  sampler = FakeSampler()
  with Running(make_loop(sampler=sampler)) as loop:
    train(loop, sampler, 3)
    state = through_storage(*loop.state_dict())
    before = loop.stats()
  resumed = make_loop()
  resumed.load_state_dict(*state)
  after = resumed.stats()
  for name in ("used", "used_tokens", "token_lags", "trained", "mean_lag"):
    assert after[name] == before[name]


def test_a_state_of_before_the_ledger_goes_on():
  """A state of the loop that counted admission, intake and buffer apart: 6 in flight, 3 buffered, 2 in training."""
  saved = json.loads((pathlib.Path(__file__).parents[1] / "toys" / "rollout_state_before_ledger.json").read_text())
  arrays = {
    name: np.asarray([np.nan if value is None else value for value in values], dtype)
    for name, (dtype, values) in saved["arrays"].items()
  }
  sampler, used = FakeSampler(version=1), []
  loop = make_loop(sampler=sampler, slots=6, prompts=FakePrompts(24))
  loop.load_state_dict(saved["state"], arrays)
  counters = loop.stats()
  check_identity(counters)
  assert (counters["submitted"], counters["in_flight"], counters["buffered"], counters["trained"]) == (16, 6, 5, 4)
  assert counters["failed_infrastructure/InfrastructureFailure(OSError)"] == counters["failed_infrastructure"] == 1
  assert counters["capacity"] == 1 and counters["used_tokens"] == 27 and loop.buffer.version == 1

  # What it would save now is what it was given.
  state, arrays_again = loop.state_dict()
  assert state["intake"].pop("group_size") == 1
  assert all(record.pop("sample") == 0 for record in state["trajectories"])
  statistics = state["buffer"]["statistics"]
  assert statistics.pop("recent_seconds") == []
  assert all(statistics["sums"].pop(name) == 0 for name in SINCE)
  statistics["sums"] |= {
    name: saved["state"]["buffer"]["statistics"]["sums"][name] for name in ("slot_seconds", "busy_slot_seconds")
  }
  assert json.loads(json.dumps(state)) == saved["state"]
  for name, array in arrays.items():
    np.testing.assert_array_equal(arrays_again[name], array)

  with Running(loop):
    train(loop, sampler, 4, version=1, inspect=collect(used))
    wait_until(lambda: loop.stats()["submitted"] == 24)
    stats = loop.stats()
  assert used[:4] == [6, 8, 10, 12]  # those in training come first
  # 0, 2, 3 and 4 were trained on, 1 had failed; three are left in the end.
  assert len(used) == len(set(used)) == 16 and set(used) <= {*range(5, 24)}
  assert stats["trained"] == 20 and stats["failed_infrastructure"] == 1
  again = [request.rollout_id for request in sampler.requests[:6]]
  assert again == [5, 7, 9, 11, 13, 15]


def test_large_buffer_is_copied_outside_the_lock(monkeypatch):
  loop, held = make_loop(), []

  def look():
    held.append(not loop.ledger.lock.acquire(timeout=5))
    if not held[0]:
      loop.ledger.lock.release()

  def copy(trajectories):
    other = threading.Thread(target=look)
    other.start()
    other.join()
    return trajectories_to_state(trajectories)

  monkeypatch.setattr(rollout_loop, "trajectories_to_state", copy)
  loop.state_dict()
  assert held == [False]
