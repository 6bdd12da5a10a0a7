"""The ledger: capacity, groups, and the identity of the counters under any sequence of operations."""

from __future__ import annotations

import collections
import json
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from toys.rollout_fakes import FakePrompts, make_trajectory, submit

from sao_jax.errors import ConfigError
from sao_jax.rollout.entries import Finished
from sao_jax.rollout.ledger import Ledger
from sao_jax.rollout.outcomes import Outcome, check_identity


def finished(rollout_id: int, sample: int = 0, version: int = 0) -> Finished:
  return Finished(make_trajectory(rollout_id, sample=sample), 4, version)


def run_batch(ledger: Ledger, first: int, size: int) -> None:
  """Submits rollouts, finishes them, and trains on them."""
  for number in range(first, first + size):
    assert submit(ledger, number)
    assert ledger.finish(number, finished(number))
  ledger.hand_out(size)
  ledger.done({(Outcome.TRAINED, ""): size})


def restored(ledger: Ledger, **options) -> Ledger:
  """What goes on from a state that went through JSON."""
  state = ledger.state()
  copy = Ledger(**options)
  copy.restore(
    *json.loads(json.dumps([state.intake, state.admission])),
    [Finished(trajectory, trajectory.num_sampled, 0) for trajectory in state.trajectories],
  )
  return copy


@pytest.mark.parametrize("version", [0, 5, 10, 50])
def test_capacity_after_a_restore_does_not_depend_on_the_version(version):
  ledger = Ledger(batch_size=16, staleness=2)
  for step in range(version):
    run_batch(ledger, 16 * step, 16)
  copy = restored(ledger, batch_size=16, staleness=2)
  assert copy.capacity == 48
  for number in range(5):
    assert submit(copy, 10_000 + number)
  assert copy.capacity == 43


@pytest.mark.parametrize("eta, batch_size", [(0, 1), (0, 4), (1, 3), (4, 2)])
def test_no_more_than_eta_plus_one_batches_are_under_way(eta, batch_size):
  ledger, limit = Ledger(batch_size, eta), (eta + 1) * batch_size
  assert [submit(ledger, number) for number in range(limit + 1)] == [True] * limit + [False]
  for number in range(batch_size):
    ledger.finish(number, finished(number))
  assert not submit(ledger, 99)
  ledger.hand_out(batch_size)
  assert not submit(ledger, 99)  # a batch in training holds its capacity until its version is published
  ledger.done({(Outcome.TRAINED, ""): batch_size})
  assert ledger.capacity == batch_size


def test_every_outcome_gives_its_capacity_back_and_says_so():
  ledger = Ledger(batch_size=1, staleness=0)
  freed = []
  ledger.on_capacity = lambda: freed.append(ledger.capacity)
  for number, outcome in enumerate(Outcome):
    assert submit(ledger, number) and not submit(ledger, 99)
    if outcome is Outcome.ABORTED:
      assert ledger.abort(number)
    else:
      ledger.fail(number, outcome, "why")
  assert freed == [1] * len(Outcome)
  counters = ledger.counters()
  assert counters["submitted"] == len(Outcome) == sum(counters[outcome.value] for outcome in Outcome)
  assert counters["filtered/why"] == 1


def test_a_rollout_is_in_one_place_and_leaves_it_once():
  ledger = Ledger(batch_size=2, staleness=0)
  assert submit(ledger, 0)
  with pytest.raises(RuntimeError, match="stands in the ledger already"):
    submit(ledger, 0)
  with pytest.raises(RuntimeError, match="rollout 1 is not in the ledger"):
    ledger.finish(1, finished(1))
  assert ledger.finish(0, finished(0))
  for again in (
    lambda: ledger.finish(0, finished(0)),
    lambda: ledger.fail(0, Outcome.FILTERED, "why"),
    lambda: ledger.abort(0),
  ):
    with pytest.raises(RuntimeError, match="rollout 0 is buffered"):
      again()
  ledger.hand_out(1)
  with pytest.raises(RuntimeError, match="rollout 0 is in_training"):
    ledger.cancel([0], Outcome.DROPPED_STALE, "old")
  with pytest.raises(RuntimeError, match="a batch of 1"):
    ledger.done({(Outcome.TRAINED, ""): 2})
  with pytest.raises(RuntimeError, match="1 trajectories .* 0 are ready"):
    ledger.hand_out(1)
  counters = ledger.counters()
  check_identity(counters)
  assert (counters["submitted"], counters["in_training"]) == (1, 1)


def test_identity_notices_a_lost_rollout():
  counters = Ledger(1, 0).counters()
  with pytest.raises(RuntimeError, match="submitted 1"):
    check_identity({**counters, "submitted": 1})


def test_state_saves_training_as_buffered_and_aborted_as_in_flight():
  ledger = Ledger(batch_size=4, staleness=0)
  for number in range(4):
    submit(ledger, number)
  ledger.finish(1, finished(1))
  ledger.hand_out(1)
  ledger.finish(3, finished(3))
  ledger.abort(2)
  copy = restored(ledger, batch_size=4, staleness=0)
  counters = copy.counters()
  check_identity(counters)
  assert (counters["in_flight"], counters["buffered"], counters["in_training"], counters["aborted"]) == (2, 2, 0, 0)
  assert [copy.start(FakePrompts(0)).rollout_id for _ in range(2)] == [0, 2] and copy.num_ready == 2


@pytest.mark.parametrize("what", ["submitted", "unfinished", "trajectories"])
def test_a_damaged_state_is_refused(what):
  ledger = Ledger(batch_size=4, staleness=0)
  submit(ledger, 0), submit(ledger, 1)
  ledger.finish(1, finished(1))
  intake, admission, trajectories = ledger.state()
  if what == "submitted":
    admission["submitted"] += 1
  if what == "unfinished":
    intake["unfinished"] = []
  with pytest.raises(RuntimeError, match="is not the sum"):
    Ledger(4, 0).restore(intake, admission, [] if what == "trajectories" else [finished(1)])


def test_identity_under_threads():
  ledger = Ledger(batch_size=8, staleness=3)
  numbers, submitted = iter(range(10**6)), []

  def work(outcome):
    for _ in range(500):
      with ledger.lock:
        number = next(numbers)
        entered = submit(ledger, number)
      if entered:
        submitted.append(number)
        ledger.fail(number, outcome, "")

  threads = [threading.Thread(target=work, args=(outcome,)) for outcome in (Outcome.TRAINED, Outcome.MASKED)]
  for thread in threads:
    thread.start()
  for _ in range(100):
    check_identity(ledger.counters())
  for thread in threads:
    thread.join()
  assert ledger.counters()["submitted"] == len(submitted) == 1000


# Groups.


def start_all(ledger: Ledger, prompts: FakePrompts) -> list:
  rollouts = []
  while (rollout := ledger.start(prompts)) is not None:
    rollouts.append(rollout)
  return rollouts


def test_every_prompt_is_rolled_out_by_its_whole_group_under_consecutive_ids():
  ledger, prompts = Ledger(batch_size=6, staleness=1, group_size=3), FakePrompts()
  rollouts = start_all(ledger, prompts)
  assert [rollout.rollout_id for rollout in rollouts] == list(range(12)) and ledger.capacity == 0
  assert [(r.prompt.key.id, r.sample) for r in rollouts] == [(prompt, s) for prompt in range(4) for s in range(3)]
  # What leaves makes room for one prompt, and whole groups only.
  assert ledger.fail(4, Outcome.FAILED_ENVIRONMENT, "bug") == []
  assert [(r.rollout_id, r.prompt.key.id, r.sample) for r in start_all(ledger, prompts)] == [
    (12, 4, 0),
    (13, 4, 1),
    (14, 4, 2),
  ]


def test_a_batch_is_made_of_whole_groups_in_the_order_of_their_completion():
  ledger = Ledger(batch_size=4, staleness=1, group_size=2)
  rollouts = {rollout.rollout_id: rollout for rollout in start_all(ledger, FakePrompts(4))}
  for number, ready in [(0, 0), (5, 0), (2, 0), (7, 0), (4, 2), (6, 4), (3, 6), (1, 8)]:
    assert ledger.finish(number, finished(number, rollouts[number].sample)) and ledger.num_ready == ready
  assert [t.rollout_id for t in ledger.hand_out(4)] == [4, 5, 6, 7]  # sorted within the batch
  ledger.take_back()
  assert [t.rollout_id for t in ledger.hand_out(2)] == [4, 5]
  assert [(t.rollout_id, t.group) for t in ledger.hand_out(4)] == [(2, 2), (3, 2), (6, 6), (7, 6)]
  with pytest.raises(RuntimeError, match="groups of 2"):
    ledger.hand_out(1)


@pytest.mark.parametrize("batch_size, group_size", [(4, 3), (4, 0), (2, 4)])
def test_a_batch_that_is_not_made_of_whole_groups_is_refused(batch_size, group_size):
  with pytest.raises(ValueError, match="multiple of group_size"):
    Ledger(batch_size, 1, group_size=group_size)


def test_a_failure_ends_its_group_and_only_its_group():
  ledger, cancelled = Ledger(batch_size=4, staleness=1, group_size=4), []
  ledger.on_cancel = cancelled.append
  assert [ledger.start(FakePrompts()).rollout_id for _ in range(7)] == list(range(7))  # 7 waits for a slot
  ledger.finish(0, finished(0))
  ledger.finish(4, finished(4))
  # 0 is buffered, 1 fails, 2 and 3 run.
  assert [one.trajectory.rollout_id for one in ledger.fail(1, Outcome.FAILED_INFRASTRUCTURE, "gone")] == [0]
  assert cancelled == [2, 3] and ledger.capacity == 4
  counters = ledger.counters()
  check_identity(counters)
  assert counters["failed_infrastructure/gone"] == 1 and counters["failed_infrastructure/group/gone"] == 3
  assert (counters["failed_infrastructure"], counters["buffered"], counters["in_flight"]) == (4, 1, 3)
  # Each of them reports once, whatever it has come to, and changes nothing.
  assert ledger.finish(2, finished(2)) is False and ledger.abort(3) is False
  assert ledger.counters() == counters
  with pytest.raises(RuntimeError, match="not in the ledger"):
    ledger.abort(3)
  # 7 was never started: nobody has to stop it.
  ledger.cancel([4], Outcome.DROPPED_STALE, "old")
  assert cancelled == [2, 3, 5, 6] and ledger.start(FakePrompts(0)) is None
  assert ledger.counters()["dropped_stale/group/old"] == 3 and ledger.capacity == 8


def test_what_was_aborted_is_not_rolled_out_again_once_its_group_has_ended():
  ledger = Ledger(batch_size=2, staleness=0, group_size=2)
  start_all(ledger, FakePrompts(1))
  ledger.finish(0, finished(0))
  ledger.abort(1)
  assert [number for number, *_ in ledger.state().intake["unfinished"]] == [1]
  ledger.cancel([0], Outcome.DROPPED_STALE, "old")
  counters = ledger.counters()
  check_identity(counters)
  assert (counters["dropped_stale"], counters["aborted"]) == (2, 0) and ledger.state().intake["unfinished"] == []


def test_a_half_finished_group_goes_on_after_a_resume():
  ledger = Ledger(batch_size=4, staleness=1, group_size=2)
  rollouts = start_all(ledger, FakePrompts())
  for number in (6, 0, 3, 7, 2):
    ledger.finish(number, finished(number, number % 2))
  copy = restored(ledger, batch_size=4, staleness=1, group_size=2)
  assert copy.num_ready == 4 and copy.capacity == 0
  again = start_all(copy, FakePrompts(0))
  assert again == [rollouts[1], rollouts[4], rollouts[5]]  # ids, prompts and samples
  assert [t.rollout_id for t in copy.hand_out(2)] == [6, 7]  # the group that was complete first
  copy.finish(1, finished(1, 1))
  assert [t.rollout_id for t in copy.hand_out(4)] == [0, 1, 2, 3]
  check_identity(copy.counters())


def test_what_goes_on_is_saved_again_until_it_ends():
  """A run that is killed twice: what the second process had begun anew is still known to the third."""
  ledger = Ledger(batch_size=2, staleness=1)
  rollouts = start_all(ledger, FakePrompts())
  ledger.finish(1, finished(1))
  unfinished = ledger.state().intake["unfinished"]
  assert [number for number, *_ in unfinished] == [0, 2, 3]
  copy = restored(ledger, batch_size=2, staleness=1)
  assert copy.state().intake == ledger.state().intake
  assert start_all(copy, FakePrompts(0)) == [rollouts[number] for number in (0, 2, 3)]
  assert copy.state().intake["unfinished"] == unfinished and copy.counters()["in_flight"] == 3
  copy.finish(2, finished(2))
  copy.fail(3, Outcome.FAILED_ENVIRONMENT, "it broke")
  again = restored(copy, batch_size=2, staleness=1)
  assert again.state().intake["unfinished"] == unfinished[:1] and again.state().intake["next_rollout_id"] == 4


def test_a_state_with_groups_of_another_size_is_refused():
  ledger = Ledger(batch_size=4, staleness=0, group_size=2)
  for options in ({}, {"group_size": 4}):
    with pytest.raises(ConfigError, match="groups of 2") as error:
      restored(ledger, batch_size=4, staleness=0, **options)
    assert error.value.field == "rollout.group_size"


def test_in_rounds_nothing_is_handed_out_before_all_is_there():
  ledger = Ledger(batch_size=2, staleness=1, in_rounds=True)
  start_all(ledger, FakePrompts())
  for number in (3, 1, 0):
    ledger.finish(number, finished(number))
    assert ledger.num_ready == 0 and not ledger.idle
  ledger.finish(2, finished(2))
  assert ledger.idle and [t.rollout_id for t in ledger.hand_out(2)] == [0, 1]
  ledger.done({(Outcome.TRAINED, ""): 2})
  prompts = FakePrompts(1)
  start_all(ledger, prompts)
  assert ledger.exhausted and not ledger.idle and ledger.num_ready == 2  # those of the round before
  ledger.finish(4, finished(4))
  assert ledger.idle and [t.rollout_id for t in ledger.hand_out(3)] == [2, 3, 4]


class Operations(RuleBasedStateMachine):
  """Any sequence of operations, next to a plain record of what every rollout has become."""

  @rule(group_size=st.sampled_from([1, 2, 3]), in_rounds=st.booleans())
  @precondition(lambda self: not hasattr(self, "ledger"))
  def begin(self, group_size, in_rounds):
    self.options = {"batch_size": 6, "staleness": 1, "group_size": group_size, "in_rounds": in_rounds}
    self.ledger, self.prompts = Ledger(**self.options), FakePrompts()
    self.place: dict[int, str] = {}  # of every rollout ever: waiting, running, buffered, training, aborted or ended
    self.batches: list[list[int]] = []
    self.to_report: set[int] = set()
    self.ledger.on_cancel = self.to_report.add

  def group_of(self, number):
    size = self.options["group_size"]
    return range(number - number % size, number - number % size + size)

  def some(self, data, *places):
    numbers = [number for number, place in self.place.items() if place in places]
    return data.draw(st.sampled_from(numbers)) if numbers else None

  def end_group(self, number, *, cancels):
    running = {n for n in self.group_of(number) if self.place[n] == "running"} - ({number} if not cancels else set())
    self.place |= dict.fromkeys(self.group_of(number), "ended")
    return running

  started = precondition(lambda self: hasattr(self, "ledger"))

  @started
  @rule()
  def start(self):
    room = sum(place not in ("ended", "aborted") for place in self.place.values()) + self.options["group_size"] <= 12
    waiting = [number for number, place in self.place.items() if place == "waiting"]
    rollout = self.ledger.start(self.prompts)
    if rollout is None:
      assert not waiting and not room
      return
    assert rollout.rollout_id == (min(waiting) if waiting else len(self.place))
    self.place |= {n: self.place.get(n, "waiting") for n in self.group_of(rollout.rollout_id)}
    self.place[rollout.rollout_id] = "running"

  @started
  @rule(data=st.data())
  def finish(self, data):
    if (number := self.some(data, "running")) is not None:
      assert self.ledger.finish(number, finished(number, number % self.options["group_size"]))
      self.place[number] = "buffered"

  @started
  @rule(data=st.data(), outcome=st.sampled_from([Outcome.FILTERED, Outcome.FAILED_ENVIRONMENT]))
  def fail(self, data, outcome):
    if (number := self.some(data, "running")) is not None:
      before, buffered = set(self.to_report), {n for n in self.group_of(number) if self.place[n] == "buffered"}
      removed = self.ledger.fail(number, outcome, "why")
      assert {one.trajectory.rollout_id for one in removed} == buffered
      assert self.to_report - before == self.end_group(number, cancels=False)

  @started
  @rule(data=st.data())
  def cancel(self, data):
    if (number := self.some(data, "waiting", "running", "buffered")) is not None:
      before = set(self.to_report)
      self.ledger.cancel([number], Outcome.DROPPED_STALE, "old")
      assert self.to_report - before == self.end_group(number, cancels=True)

  @started
  @rule(data=st.data(), how=st.sampled_from(["finish", "fail", "abort"]))
  def report_what_was_cancelled(self, data, how):
    if self.to_report:
      number = data.draw(st.sampled_from(sorted(self.to_report)))
      before = self.ledger.counters()
      if how == "finish":
        assert self.ledger.finish(number, finished(number)) is False
      elif how == "fail":
        assert self.ledger.fail(number, Outcome.FILTERED, "why") is None
      else:
        assert self.ledger.abort(number) is False
      self.to_report.remove(number)
      assert self.ledger.counters() == before

  @started
  @rule(data=st.data())
  def abort(self, data):
    if (number := self.some(data, "running")) is not None:
      assert self.ledger.abort(number)
      self.place[number] = "aborted"

  @started
  @rule(groups=st.integers(1, 2))
  def take(self, groups):
    count = groups * self.options["group_size"]
    if count <= self.ledger.num_ready:
      batch = [trajectory.rollout_id for trajectory in self.ledger.hand_out(count)]
      assert batch == sorted(set(batch)) and all(self.place[number] == "buffered" for number in batch)
      assert all(other in batch for number in batch for other in self.group_of(number))
      self.place |= dict.fromkeys(batch, "training")
      self.batches.append(batch)

  @started
  @rule()
  def give_back(self):
    if self.batches:
      self.ledger.take_back()
      self.place |= dict.fromkeys(self.batches.pop(), "buffered")

  @started
  @rule()
  def done(self):
    if self.batches:
      batch = self.batches.pop(0)
      self.ledger.done({(Outcome.TRAINED, ""): len(batch) - 1, (Outcome.MASKED, "all tokens"): 1})
      self.place |= dict.fromkeys(batch, "ended")

  @started
  @rule()
  def save_and_go_on(self):
    self.ledger = restored(self.ledger, **self.options)
    self.ledger.on_cancel = self.to_report.add
    self.to_report.clear()
    self.batches.clear()
    again = {"running": "waiting", "aborted": "waiting", "training": "buffered"}
    self.place = {number: again.get(place, place) for number, place in self.place.items()}

  @started
  @invariant()
  def nothing_is_lost(self):
    counters = self.ledger.counters()
    check_identity(counters)
    here = collections.Counter(self.place.values())
    assert counters["submitted"] == len(self.place)
    assert counters["in_flight"] == here["waiting"] + here["running"]
    assert (counters["buffered"], counters["in_training"]) == (here["buffered"], here["training"])
    assert counters["aborted"] == here["aborted"]
    assert sum(counters[outcome.value] for outcome in Outcome) == here["aborted"] + here["ended"]
    state = self.ledger.state()
    kept = [number for number, *_ in state.intake["unfinished"]] + [t.rollout_id for t in state.trajectories]
    assert sorted(kept) == sorted(number for number, place in self.place.items() if place != "ended")
    if not self.options["in_rounds"]:
      complete = [n for n in self.place if all(self.place[m] == "buffered" for m in self.group_of(n))]
      assert self.ledger.num_ready == len(complete)


test_any_sequence_of_operations = Operations.TestCase


@given(st.permutations(range(12)), st.sampled_from([1, 2, 3, 4, 6]))
def test_groups_come_out_once_each_whatever_the_order(order, group_size):
  ledger = Ledger(batch_size=12, staleness=0, group_size=group_size)
  start_all(ledger, FakePrompts())
  completed, left = [], collections.Counter(dict.fromkeys(range(0, 12, group_size), group_size))
  for number in order:
    ledger.finish(number, finished(number, number % group_size))
    group = number - number % group_size
    left[group] -= 1
    completed += [group] if not left[group] else []
  assert [trajectory.group for _ in completed for trajectory in ledger.hand_out(group_size)][::group_size] == completed
