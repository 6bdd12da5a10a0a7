"""The buffer: order, staleness at consumption, accounting, waiting and errors."""

from __future__ import annotations

import threading
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from beartype import beartype
from hypothesis import given
from jaxtyping import jaxtyped
from toys.rollout_fakes import completion, fill, make_buffer, make_trajectory, submit

from sao_jax.episode import Trajectory
from sao_jax.learner.packing import pack
from sao_jax.rollout import buffer as buffer_module
from sao_jax.rollout import statistics
from sao_jax.rollout.evidence import check_completion
from sao_jax.rollout.outcomes import BadEvidence, check_identity
from sao_jax.rollout.staleness import decisive_version, is_stale, mask_over_age, token_lags


def ids(trajectories) -> list[int]:
  return [trajectory.rollout_id for trajectory in trajectories]


def test_first_in_first_out_and_sorted_within_the_batch():
  buffer = make_buffer(batch_size=2)
  fill(buffer, *(make_trajectory(i) for i in (5, 3, 4, 0)))
  assert ids(buffer.take(2, 0)) == [3, 5]
  assert ids(buffer.take(2, 0)) == [0, 4]


def test_a_batch_in_training_holds_its_capacity_until_it_is_done():
  buffer = make_buffer(batch_size=2, eta=0)
  fill(buffer, make_trajectory(0), make_trajectory(1))
  buffer.take(2, 0)
  assert buffer.ledger.capacity == 0 and len(buffer) == 0
  buffer.batch_done(1)
  assert buffer.ledger.capacity == 2 and buffer.version == 1
  counters = buffer.ledger.counters()
  assert (counters["submitted"], counters["trained"]) == (2, 2)
  with pytest.raises(RuntimeError, match="no batch"):
    buffer.batch_done(2)


def test_lag_includes_the_time_in_the_queue():
  buffer = make_buffer(batch_size=1, version=7)
  fill(buffer, make_trajectory(0, version=7))
  (trajectory,) = buffer.take(1, 11)
  assert set(token_lags(trajectory, 11).tolist()) == {4}
  buffer.batch_done(12)
  assert buffer.statistics.summary()["token_lags"] == {4: 4}


def test_a_token_from_the_future_is_an_error_and_never_clamped():
  buffer = make_buffer(batch_size=1)
  fill(buffer, make_trajectory(0, version=3))
  with pytest.raises(RuntimeError, match="version 3"):
    buffer.take(1, 2)


def test_versions_never_go_back():
  buffer = make_buffer(version=5)
  with pytest.raises(ValueError, match="never go back"):
    buffer.set_version(4)


def test_drop_gives_capacity_back_and_counts_by_length():
  buffer = make_buffer(batch_size=2, eta=1, max_staleness=2)
  fill(buffer, make_trajectory(0, turns=((5, 0),)), make_trajectory(1, version=[0, 1, 2, 3]))
  fill(buffer, make_trajectory(2, version=1), make_trajectory(3, version=3))
  assert buffer.ledger.capacity == 0
  assert ids(buffer.take(2, 3)) == [2, 3]  # 0 and 1 have tokens of lag 3
  assert buffer.ledger.capacity == 2
  counters = buffer.ledger.counters()
  check_identity(counters)
  assert counters["dropped_stale"] == 2
  summary = buffer.statistics.summary()
  assert summary["dropped_by_length"] == {4: 1, 8: 1} and summary["drop_rate_by_length"] == {4: 1 / 3, 8: 1.0}


def test_over_age_on_arrival_is_dropped():
  buffer = make_buffer(batch_size=1, max_staleness=2, version=5)
  assert fill(buffer, make_trajectory(0, version=2), make_trajectory(1, version=3)) == [False, True]
  assert buffer.ledger.counters()["dropped_stale"] == 1


def test_take_goes_on_waiting_when_it_drops():
  buffer = make_buffer(batch_size=2, max_staleness=0)
  fill(buffer, make_trajectory(0), make_trajectory(1))
  batches = []
  taker = threading.Thread(target=lambda: batches.append(buffer.take(2, 1, timeout=20)))
  taker.start()
  fill(buffer, make_trajectory(2, version=1), make_trajectory(3, version=1))
  taker.join()
  assert ids(batches[0]) == [2, 3]


def test_mask_keeps_what_is_young_enough():
  buffer = make_buffer(batch_size=1, max_staleness=2, staleness="mask", version=3)
  original = make_trajectory(0, turns=((3, 2), (2, 1)), version=[0, 0, 1, 1, 3])
  fill(buffer, original)
  (used,) = buffer.take(1, 3)
  # prompt(2) sampled(3) observation(2) sampled(2) observation(1); the first two tokens have lag 3.
  assert used.trained.tolist() == [0, 0, 0, 0, 1, 0, 0, 1, 1, 0] and used.num_trained == 3
  # They stay what they are, sampled tokens: only the losses leave them out.
  for name in ("token_ids", "action_mask", "behavior_logprobs", "policy_version", "turn_starts", "reward"):
    assert getattr(used, name) is getattr(original, name)
  assert original.loss_mask is None and original.num_trained == 5  # untouched
  batch = pack([used, make_trajectory(1, version=3)], (32,), (1,))
  first = batch.segment_ids[0] == 1
  assert batch.loss_mask[0, first].tolist() == used.trained.tolist()
  assert batch.action_mask[0, first].tolist() == used.action_mask.tolist()
  assert batch.rewards[0, first].tolist() == [0] * 8 + [used.reward, 0]
  assert (batch.loss_mask == batch.action_mask)[0, ~first].all()
  buffer.batch_done(4)
  counters = buffer.ledger.counters()
  assert (counters["masked"], counters["trained"]) == (1, 0)
  summary = buffer.statistics.summary()
  assert (summary["masked_tokens"], summary["used_tokens"], summary["max_lag"]) == (2, 3, 2)


def test_mask_drops_whole_turns_and_whole_trajectories():
  trajectory = make_trajectory(0, turns=((2, 1), (2, 1)), version=[0, 0, 5, 5])
  masked = mask_over_age(trajectory, 5, 1)
  assert (masked.num_trained, masked.num_sampled) == (2, 4) and np.flatnonzero(masked.trained)[0] == masked.turn_starts[
    1
  ]
  decisive = decisive_version(trajectory, "mask")
  assert not is_stale(decisive, 6, 1) and is_stale(decisive, 7, 1)
  assert not is_stale(decisive, 100, -1) and mask_over_age(trajectory, 100, -1) is trajectory
  buffer = make_buffer(batch_size=1, max_staleness=1, staleness="mask", version=7)
  assert fill(buffer, trajectory) == [False]


def test_annotations_hold():
  typed = jaxtyped(typechecker=beartype)
  trajectory = make_trajectory(version=3)
  assert typed(token_lags)(trajectory, 5).tolist() == [2] * 4
  assert len(typed(mask_over_age)(trajectory, 5, 2)) == len(trajectory)
  assert len(typed(check_completion)(completion([5, 2]), 8, (2,))) == 3


@given(
  versions=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4).map(sorted), min_size=1, max_size=12),
  tau=st.integers(0, 4),
  mode=st.sampled_from(["drop", "mask"]),
)
def test_the_bound_holds_and_nothing_is_lost(versions, tau, mode):
  buffer = make_buffer(batch_size=2, eta=9, max_staleness=tau, staleness=mode)
  fill(buffer, *(make_trajectory(i, turns=((len(v), 1),), version=v) for i, v in enumerate(versions)))
  usable = [i for i, v in enumerate(versions) if 9 - (min(v) if mode == "drop" else max(v)) <= tau]
  taken = []
  for _ in range(len(usable) // 2):
    batch = buffer.take(2, 9, timeout=0)
    taken += ids(batch)
    assert all(token_lags(trajectory, 9).max() <= tau for trajectory in batch)
    for trajectory in batch:
      kept = [version for version in versions[trajectory.rollout_id] if 9 - version <= tau]
      assert trajectory.policy_version[trajectory.trained].tolist() == kept
    buffer.batch_done(9)
    check_identity(buffer.ledger.counters())
  assert taken == usable[: len(taken)]
  with pytest.raises(TimeoutError):
    buffer.take(2, 9, timeout=0)
  counters = buffer.ledger.counters()
  assert counters["dropped_stale"] == len(versions) - len(usable)
  assert counters["trained"] + counters["masked"] == len(taken)


def test_bad_evidence_is_not_taken_over():
  buffer = make_buffer()
  submit(buffer.ledger, 0)
  with pytest.raises(BadEvidence):
    buffer.put(make_trajectory(reward=float("nan")))
  counters = buffer.ledger.counters()
  assert (counters["in_flight"], counters["buffered"]) == (1, 0) and len(buffer) == 0


def test_take_that_can_never_fill_is_refused():
  with pytest.raises(ValueError, match="never fill"):
    make_buffer(batch_size=2, eta=1).take(5, 0)


def test_time_out_says_what_there_is():
  buffer = make_buffer(batch_size=2)
  fill(buffer, make_trajectory(0))
  with pytest.raises(TimeoutError, match="1 of 2"):
    buffer.take(2, 0, timeout=0.01)
  assert buffer.statistics.summary()["trainer_wait_seconds"] >= 0.01


class Original(Exception):
  """Even one that is false."""

  def __bool__(self) -> bool:
    return False


def test_failure_reaches_a_blocked_take_as_itself():
  buffer, error, seen = make_buffer(batch_size=2), Original(), []

  def take():
    try:
      buffer.take(2, 0, timeout=20)
    except Exception as caught:
      seen.append(caught)

  taker = threading.Thread(target=take)
  taker.start()
  time.sleep(0.05)
  buffer.fail(error)
  buffer.fail(RuntimeError("a later one"))
  taker.join(5)
  assert seen == [error]
  fill(buffer, make_trajectory(0), make_trajectory(1))
  with pytest.raises(Original):
    buffer.take(2, 0)


def test_end_hands_out_what_fills_a_batch_first():
  buffer = make_buffer(batch_size=2)
  fill(buffer, *(make_trajectory(i) for i in range(3)))
  buffer.end(Original())
  assert len(buffer.take(2, 0)) == 2
  with pytest.raises(Original):
    buffer.take(2, 0)


def test_snapshot_puts_a_batch_in_training_back_in_front_unmasked():
  buffer = make_buffer(batch_size=2, max_staleness=1, staleness="mask", version=2)
  fill(buffer, *(make_trajectory(i, turns=((2, 0),), version=[0, 2]) for i in range(3)))
  assert buffer.take(2, 2)[0].num_trained == 1
  snapshot = buffer.snapshot()
  trajectories = snapshot.trajectories
  restored = make_buffer(batch_size=2, max_staleness=1, staleness="mask")
  restored.restore(snapshot)
  assert ids(trajectories) == [0, 1, 2] and all(trajectory.num_trained == 2 for trajectory in trajectories)
  assert restored.version == 2 and restored.ledger.capacity == buffer.ledger.capacity == 3
  counters = restored.ledger.counters()
  check_identity(counters)
  assert (counters["buffered"], counters["in_training"]) == (3, 0)
  assert ids(restored.take(2, 2)) == [0, 1]


@pytest.mark.parametrize("call", ["check_trajectory", "num_sampled", "mask_over_age", "token_lags"])
def test_the_lock_is_free_while_a_trajectory_is_read(call, monkeypatch):
  """Whatever takes time in proportion to tokens, in `put` or in `take`, holds up nobody."""
  entered, release = threading.Event(), threading.Event()

  def slowly(function):
    def wrapped(*args):
      entered.set()
      assert release.wait(20)
      return function(*args)

    return wrapped

  buffer = make_buffer(batch_size=1, max_staleness=1, staleness="mask")
  submit(buffer.ledger, 0)
  trajectory, results = make_trajectory(0), []
  if call in ("mask_over_age", "token_lags"):
    assert buffer.put(trajectory)
    work = lambda: results.extend(buffer.take(1, 0))
  else:
    work = lambda: results.append(buffer.put(trajectory))
  owner, name = {
    "check_trajectory": (buffer_module, call),
    "num_sampled": (buffer_module, "decisive_version"),
    "mask_over_age": (buffer_module, call),
    "token_lags": (statistics, call),
  }[call]
  monkeypatch.setattr(owner, name, slowly(getattr(owner, name)))

  worker = threading.Thread(target=work)
  worker.start()
  assert entered.wait(20)
  assert buffer.ledger.lock.acquire(timeout=5)  # this thread does not hold it yet, and the worker does not either
  counters = buffer.ledger.counters()
  buffer.ledger.lock.release()
  check_identity(counters)
  assert worker.is_alive() and counters["submitted"] == 1
  release.set()
  worker.join(20)
  assert len(results) == 1 and results[0] in (True, trajectory)


def test_a_step_that_is_done_and_a_new_version_read_no_tokens(monkeypatch):
  buffer = make_buffer(batch_size=2, max_staleness=1)
  fill(buffer, *(make_trajectory(i) for i in range(4)))
  buffer.take(2, 0)
  for name in ("num_sampled", "num_trained", "trained", "oldest_version"):
    monkeypatch.setattr(Trajectory, name, property(lambda self: pytest.fail("tokens were read")))
  monkeypatch.setattr(statistics, "token_lags", lambda *_: pytest.fail("tokens were read"))
  buffer.batch_done(2)  # trains on two, and drops the two that are over age now
  counters = buffer.ledger.counters()
  assert (counters["trained"], counters["dropped_stale"], len(buffer)) == (2, 2, 0)
  assert buffer.statistics.summary()["used_tokens"] == 8


def test_a_batch_that_breaks_the_bound_is_taken_back(monkeypatch):
  buffer = make_buffer(batch_size=2, version=0)
  fill(buffer, *(make_trajectory(i, version=3 if i == 1 else 0) for i in range(3)))
  with pytest.raises(RuntimeError, match="version 3"):
    buffer.take(2, 2)
  counters = buffer.ledger.counters()
  assert (counters["buffered"], counters["in_training"]) == (3, 0)
  assert ids(buffer.take(2, 3)) == [0, 1]
