"""The rollout side as the training loop uses it: what it takes, records, publishes and says when."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import time
import types
from typing import NamedTuple

import pytest
from toys import processes, training_toy
from toys.paths import REPOSITORY
from toys.rollout_fakes import FakeEnvironment, FakeSampler, Running, completion, make_loop, train
from toys.shared_store import SharedStore

from sao_jax.interrupt import POLL, Interrupt
from sao_jax.parallel import agreement
from sao_jax.parallel.agreement import Processes, SharedStop
from sao_jax.parallel.process import DataShare
from sao_jax.training import phases
from sao_jax.training.consumed import Record
from sao_jax.training.rollouts import Rollouts, make_rollout_loop


class Batch(NamedTuple):
  """A batch without rows."""

  trajectories: list


class Sampler(FakeSampler):
  """A fake one that also answers in rounds."""

  def submit_all(self, requests):
    futures = [concurrent.futures.Future() for _ in requests]
    for future, request in zip(futures, requests):
      future.set_result(self.answer(request))
    return futures


class Service:
  """Writes down what is published, and with how many rollouts under way."""

  def __init__(self, loop, sampler):
    self.loop, self.sampler, self.published = loop, sampler, []

  def publish(self, params, version):
    self.published.append((params, version, self.loop.stats()["in_flight"]))
    self.sampler.version = version

  def stats(self):
    return {}


def make(record=None, interrupt=None, look=lambda: None, delay=0.0, agree=None, **config) -> tuple[Rollouts, Service]:
  sampler = Sampler(delay=lambda rollout_id: delay)
  loop = make_loop(sampler=sampler, **config)
  service = Service(loop, sampler)
  deterministic = config.get("deterministic", False)
  return (
    Rollouts(
      loop,
      4,
      interrupt or Interrupt(),
      service=service,
      record=record,
      first_step=7,
      deterministic=deterministic,
      look=look,
      agree=agree or (lambda trajectories, look: None if trajectories is None else Batch(trajectories)),
    ),
    service,
  )


def ids(batch) -> list[int]:
  return [trajectory.rollout_id for trajectory in batch.trajectories]


def test_what_a_step_consumes_is_recorded_under_its_number(tmp_path):
  record = Record(tmp_path, "train")
  rollouts, _ = make(record, admission_staleness=0)
  taken = []
  with rollouts:
    for version in range(3):
      taken.append(rollouts.take(version))
      rollouts.consumed(taken[-1].trajectories)
      rollouts.end_step(version + 1, "weights")
  assert [ids(batch) for batch in taken] == [list(range(4 * n, 4 * n + 4)) for n in range(3)]
  for step, batch in zip((8, 9, 10), taken, strict=True):
    assert [t.token_ids.tolist() for t in record.read(step)] == [t.token_ids.tolist() for t in batch.trajectories]
  assert record.missing(10) == list(range(1, 8))


def test_a_batch_that_no_step_consumed_is_not_recorded(tmp_path):
  record = Record(tmp_path, "train")
  rollouts, _ = make(record, admission_staleness=0)
  with rollouts:
    rollouts.take(0)  # as when the process is asked to stop while the step compiles
  assert not list(tmp_path.rglob("*.npz"))


def test_nothing_is_recorded_unless_it_is_wanted(tmp_path):
  rollouts, _ = make()
  with rollouts:
    rollouts.consumed(rollouts.take(0).trajectories)
  assert not list(tmp_path.iterdir()) and not rollouts.loop._thread.is_alive()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_ends_with_its_weights_published_and_only_then_its_batch_is_trained_on(deterministic):
  rollouts, service = make(deterministic=deterministic, admission_staleness=1)
  with rollouts:
    rollouts.take(0)
    assert rollouts.loop.stats()["in_training"] == 4
    rollouts.end_step(1, "new")
    assert service.published[0][:2] == ("new", 1)
    if deterministic:  # what was begun under version 0 has ended under it
      assert service.published[0][2] == 0
    assert rollouts.loop.stats()["trained"] == 4 and rollouts.loop.buffer.version == 1
    rollouts.take(1)
    rollouts.end_step(1)  # a step of the critic alone publishes nothing
    assert len(service.published) == 1 and rollouts.loop.stats()["trained"] == 8


def test_a_deterministic_run_is_saved_as_it_was_when_its_version_was_published():
  """Whatever has been begun or has finished since: the next process begins it anew, under that version."""
  rollouts, _ = make(deterministic=True, admission_staleness=1)
  saved = lambda: rollouts.state_dict()[0]
  with rollouts:
    rollouts.loop.wait_until_idle(20)
    beginning = saved()
    assert (beginning["intake"]["next_rollout_id"], beginning["trajectories"]) == (
      0,
      [],
    )  # not the eight that are there
    rollouts.take(0)
    assert saved() == beginning
    rollouts.end_step(1, "new")
    published = saved()
    assert published["buffer"]["version"] == 1 and published["buffer"]["admission"]["outcomes"] == {"trained": 4}
    assert published["intake"]["unfinished"] == [] and published["intake"]["next_rollout_id"] == 8
    assert [record["rollout_id"] for record in published["trajectories"]] == [4, 5, 6, 7]
    rollouts.loop.wait_until_idle(20)
    assert len(rollouts.loop.buffer) == 8 and saved() == published
  assert saved() == published


def test_a_requested_interruption_ends_the_wait_without_a_batch():
  interrupt, looks = Interrupt(), []

  def look():
    looks.append(time.monotonic())
    interrupt.requested = len(looks) == 2

  rollouts, _ = make(interrupt=interrupt, look=look, delay=3600.0)
  with rollouts:
    began = time.monotonic()
    assert rollouts.take(0) is None
    assert len(looks) == 2 and POLL <= time.monotonic() - began < 20
    assert rollouts.take(0) is None and len(looks) == 2  # at once


def test_a_stop_and_a_failure_are_noticed_while_the_batches_of_others_are_waited_for(monkeypatch):
  monkeypatch.setattr(agreement, "SLICE", 0.02)
  store, signal = SharedStore(), Interrupt()
  own, other = (Processes(index, 2, store) for index in (0, 1))

  def agree(trajectories, look):
    signal.requested = True  # after this process has got its batch
    return own.gather("the rows of a batch", trajectories is None, look)

  rollouts, _ = make(interrupt=SharedStop(signal, own), agree=agree)
  with rollouts, concurrent.futures.ThreadPoolExecutor(1) as thread:
    taken = thread.submit(rollouts.take, 0)
    deadline = time.monotonic() + 20
    while not other.stop_requested and time.monotonic() < deadline:
      time.sleep(0.02)
    assert other.stop_requested and not taken.done()
    assert other.gather("the rows of a batch", True) == taken.result(20) == [False, True]

  # An evaluation, for one, that fails meanwhile.
  failed = []

  def look():
    if failed:
      raise failed[0]

  rollouts, _ = make(look=look, agree=lambda trajectories, look: failed.append(LookupError("the evaluation")) or look())
  with rollouts, pytest.raises(LookupError, match="the evaluation"):
    rollouts.take(0)


def test_what_look_raises_ends_the_wait():
  def look():
    raise LookupError("the evaluation failed")

  rollouts, _ = make(look=look)
  with rollouts, pytest.raises(LookupError, match="the evaluation failed"):
    rollouts.take(0)


def test_a_timeout_of_the_rollout_side_itself_is_raised():
  error = TimeoutError("of the sampler")

  def reply(request):
    raise error

  loop = make_loop(FakeEnvironment, FakeSampler(reply=reply))
  with Rollouts(loop, 4, Interrupt()) as rollouts:
    with pytest.raises(TimeoutError) as caught:
      rollouts.take(0)
    with pytest.raises(TimeoutError):
      rollouts.check()
  assert caught.value is error


def test_metrics_are_those_since_the_step_before():
  rollouts, _ = make(admission_staleness=0, delay=0.02)
  with rollouts:
    for version in range(2):
      batch = rollouts.take(version)
      metrics = rollouts.consumed(batch.trajectories)
      assert metrics["rollouts_in_training"] == 4 and metrics["rollouts_trained"] == 4 * version
      assert 0.5 < metrics["trainer_idle_fraction"] <= 1.0 and 0 < metrics["step_seconds"] < 20
      assert metrics["take_wait_fraction"] == metrics["trainer_idle_fraction"]
      assert metrics["turns_mean"] == 2.0 and metrics["truncated_fraction"] == 0.0
      rollouts.end_step(version + 1)


def test_a_state_saved_within_a_step_has_its_batch_as_buffered():
  rollouts, _ = make(admission_staleness=0)
  with rollouts:
    batch = rollouts.take(0)
    state, arrays = rollouts.state_dict()
  again, _ = make(admission_staleness=0)
  again.load_state_dict(state, arrays)
  with again:
    assert ids(again.take(0)) == ids(batch)


def test_what_replaces_the_import_of_all_threads_is_imported_before_steps_compile():
  program = "import sys, sao_jax.training.loop; sys.exit('grain' not in sys.modules)"
  subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, env=processes.environment(), timeout=120, check=True)


@pytest.mark.parametrize(
  "phase, floor, filtered", [("train", 0.5, True), ("train", 1.0, False), ("pretrain", 0.5, False)]
)
def test_prompts_are_filtered_by_difficulty_in_training_only(phase, floor, filtered):
  phase = phases.VALUE_PRETRAINING if phase == "pretrain" else phase
  config = training_toy.replace(training_toy.get_config(), rollout={"difficulty_floor": floor, "difficulty_decay": 1.0})
  learner = types.SimpleNamespace(config=config, share=DataShare(0, 1))
  sampler = FakeSampler(
    reply=lambda request: completion([5, 24], version=sampler.version, stop_ids=training_toy.STOP_IDS)
  )
  loop = make_rollout_loop(learner, sampler, phase, 0)
  with Running(loop):
    train(loop, sampler, 24, batch_size=4)
    state, _ = loop.state_dict()
  trials = state["intake"]["prompts"].get("difficulty", {}).get("parity", [])
  assert sum(count for _, count, _ in trials) == (96 if filtered else 0)
  assert all(passed == count for _, count, passed in trials)  # the reward is always 1
  assert (loop.stats()["excluded_prompts"] > 0) == filtered  # 64 prompts: a second pass has begun
