"""Deterministic runs: the same parameters bit for bit, whatever the environments' timing, interruptions and kills."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import random
import shutil
import signal
import time

import jax
import pytest
from toys import fork_server, killed_run, processes, training_toy
from toys.paths import REPOSITORY, TESTS
from toys.runs import assert_identical, interrupted_after

from sao_jax.checkpoints.checkpointer import Checkpointer
from sao_jax.configuration.relations import validate
from sao_jax.errors import ConfigError
from sao_jax.learner import placement, setup
from sao_jax.report.metrics import read_metrics
from sao_jax.training import loop, phases, replay
from sao_jax.training.consumed import Record

STEPS = 6
KILLS, KILLED_STEPS = 10, 45  # kills of each of two runs
GRACE = 30.0  # seconds that clouds give before they take a machine
DEADLINE = 240.0  # seconds; only a hang takes as long


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))


def consumed(workdir, step):
  return [(t.rollout_id, t.token_ids.tolist(), t.policy_version.tolist()) for t in Record(workdir, "train").read(step)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("uninterrupted")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
    return workdir, loop.train(killed_run.get_config(STEPS, latency_seed=1), workdir)


@pytest.mark.parametrize("admission_staleness", [0, 2])
def test_timing_leaves_no_trace(tmp_path, admission_staleness):
  results = []
  for latency_seed in (1, 2):
    config = training_toy.replace(
      killed_run.get_config(STEPS, latency_seed), rollout={"admission_staleness": admission_staleness}
    )
    results.append(loop.train(config, tmp_path / str(latency_seed)))
  assert_identical(results[0].state, results[1].state)
  lags = {line["lag_max"] for line in read_metrics(tmp_path / "1", "train")}
  assert max(lags) == admission_staleness  # rollouts of a round are all as old as admission allows


def test_an_interrupted_run_goes_on_identically(tmp_path, uninterrupted):
  _, expected = uninterrupted
  config = killed_run.get_config(STEPS, latency_seed=3)
  with interrupted_after(3):
    interrupted = loop.train(config, tmp_path)
  assert interrupted.interrupted and interrupted.step == 3
  resumed = loop.train(config, tmp_path)
  assert resumed.step == expected.step == STEPS + 1
  assert_identical(resumed.state, expected.state)
  for step in range(1, resumed.step + 1):
    assert consumed(tmp_path, step) == consumed(uninterrupted[0], step)


def test_a_replay_reproduces_the_run(uninterrupted):
  workdir, result = uninterrupted
  replayed = replay.replay(killed_run.get_config(STEPS, latency_seed=1), workdir)
  assert replayed.identical and replayed.steps == result.step
  assert replayed.leaves == len(jax.tree.leaves(result.state))


def test_a_replay_of_other_data_differs(tmp_path, uninterrupted):
  """That a replay is identical would mean nothing if it could not be otherwise."""
  workdir = tmp_path / "copy"
  shutil.copytree(uninterrupted[0], workdir)
  record = Record(workdir, "train")
  trajectories = record.read(STEPS)
  record.write(STEPS, [dataclasses.replace(t, reward=1.0 - t.reward) for t in trajectories])
  replayed = replay.replay(killed_run.get_config(STEPS, latency_seed=1), workdir)
  assert not replayed.identical and replayed.largest_difference > 0
  record._path(2).unlink()
  with pytest.raises(ConfigError, match=r"(?s)rollout.record.*1 of the 7 steps.*step 2"):
    replay.replay(killed_run.get_config(STEPS, latency_seed=1), workdir)


def test_an_asynchronous_run_can_be_replayed_too(tmp_path):
  config = training_toy.replace(training_toy.get_config(), rollout={"record": True}, training={"steps": 3})
  loop.train(config, tmp_path)
  assert replay.replay(config, tmp_path).identical


def test_combinations_that_cannot_be_deterministic_are_refused():
  config = killed_run.get_config(STEPS, latency_seed=1)
  for rollout in ({"max_staleness": 0}, {"max_in_flight": 9}):
    with pytest.raises(ConfigError, match=r"(?s)rollout.deterministic.*remedy"):
      validate(training_toy.replace(config, rollout=rollout), training=True)
  validate(training_toy.replace(config, rollout={"max_staleness": -1, "max_in_flight": 8}), training=True)


def start(workdir, latency_seed):
  """Starts the kind of run that the directory is named after."""
  kind = workdir.name.removesuffix("_expected")
  environment = processes.environment(PYTHONPATH=f"{processes.NO_TORCH}:{REPOSITORY}:{TESTS}")
  with log_of(workdir).open("ab") as log:
    script = TESTS / "toys" / "killed_run.py", workdir, KILLED_STEPS, latency_seed, kind
    return fork_server.start(*script, environment=environment, cwd=TESTS, log=log)


def log_of(workdir):
  """What all processes of a run have printed."""
  return workdir.with_suffix(".log")


def lines(workdir):
  """Number of metrics that a run has written."""
  metrics = workdir / "metrics.jsonl"
  return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_until(condition, process):
  began = time.monotonic()
  while not condition() and process.poll() is None:
    assert time.monotonic() - began < DEADLINE
    time.sleep(0.003)


def kill_again_and_again(workdir, seed):
  """Starts a run and kills it at a random point, `KILLS` times; returns how many kills hit a save, and the next start.

  Every other kill waits for a save to be under way. Before them, one run is asked to end.
  """
  rng = random.Random(seed)
  saving = lambda: any((workdir / "train").glob("*.orbax-checkpoint-tmp*"))
  hits = 0
  for kill in range(1 + KILLS):
    process = start(workdir, latency_seed=100 * seed + kill)
    enough = lines(workdir) + rng.randint(1, 3)
    wait_until(lambda enough=enough: lines(workdir) >= enough, process)
    if kill % 2:
      wait_until(saving, process)
    else:
      time.sleep(rng.uniform(0.0, 0.05))
    hits += saving()
    assert process.poll() is None, log_of(workdir).read_text()
    if kill:
      process.send_signal(signal.SIGKILL)
      process.wait()
    else:  # a notice of preemption: there are seconds left to save
      process.send_signal(signal.SIGTERM)
      assert process.wait(GRACE) == 0, log_of(workdir).read_text()
  return hits, start(workdir, latency_seed=0)


@pytest.mark.timeout(900)  # each of its runs has a deadline of its own
def test_runs_killed_at_twenty_random_points_are_the_uninterrupted_ones(tmp_path):
  """kill -9 between and in the middle of steps, and in the middle of saves, with a single checkpoint kept."""
  kinds = ["plain", "faulty"]
  uninterrupted = []
  for kind in kinds:  # one after the other until they train: what the first has compiled, all others find
    workdir = tmp_path / f"{kind}_expected"
    uninterrupted.append(start(workdir, latency_seed=0))
    wait_until(lambda workdir=workdir: lines(workdir) > 0, uninterrupted[-1])
  with concurrent.futures.ThreadPoolExecutor() as threads:
    killed = threads.map(kill_again_and_again, [tmp_path / kind for kind in kinds], [1, 2])
  hits, processes = zip(*killed)
  assert sum(hits) >= 5
  for kind, *both in zip(kinds, uninterrupted, processes):
    for process in both:
      assert process.wait(DEADLINE) == 0, log_of(tmp_path / kind).read_text()
  restored = {}
  for kind in kinds:
    learner = setup.make_learner(killed_run.get_config(KILLED_STEPS, 0, kind))
    for name in (kind, f"{kind}_expected"):
      with Checkpointer(tmp_path / name / phases.TRAIN) as checkpointer:
        restored[name] = checkpointer.restore(setup.abstract_state(learner))
  for kind in kinds:
    assert restored[kind].step == restored[f"{kind}_expected"].step == KILLED_STEPS + 1
    assert_identical(restored[kind].state, restored[f"{kind}_expected"].state)
    for step in range(1, KILLED_STEPS + 2):
      assert consumed(tmp_path / kind, step) == consumed(tmp_path / f"{kind}_expected", step)
  evaluated = lambda name: {
    line["policy_version"]: line["heldout_success"]
    for line in read_metrics(tmp_path / name, "train")
    if "heldout_success" in line
  }
  assert evaluated("faulty") == evaluated("faulty_expected") and len(evaluated("faulty")) == KILLED_STEPS // 8 + 2
