"""Evaluation in the background: pinned to its version, while training goes on; interruptions and errors of it."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import threading
import time
from unittest import mock

import jax
import numpy as np
import pytest
from toys import hanging_toy, training_toy
from toys.metrics_table import explained_metrics
from toys.rollout_fakes import make_trajectory
from toys.shared_store import SharedStore, together

from sao_jax.environments.mixture import Mixture, Part
from sao_jax.evaluation import heldout, pinned
from sao_jax.evaluation.heldout import Evaluation, evaluate
from sao_jax.evaluation.pinned import PinnedEvaluation
from sao_jax.interrupt import Interrupt, Interrupted
from sao_jax.learner import placement, sampler_side, setup
from sao_jax.parallel import agreement
from sao_jax.parallel.agreement import SharedStop
from sao_jax.parallel.process import DataShare
from sao_jax.report.metrics import read_metrics
from sao_jax.report.success_rate import success
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.follower import FollowingService
from sao_jax.sampler.requests import GenerateRequest
from sao_jax.training import loop, phases


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))


def make_config(**training):
  config = training_toy.replace(training_toy.get_config(), training={"audit": False, "steps": 4} | training)
  return training_toy.replace(config, evaluation={"every": 2})


def evaluated(workdir):
  return {
    line["policy_version"]: (line["step"], line["heldout_success"])
    for line in read_metrics(workdir, "train")
    if "heldout_success" in line
  }


def test_the_numbers_of_an_evaluation_have_their_names():
  found = Evaluation(success(3, 4, 0.9), 0.25, 12.5, 2, 7, []).metrics()
  low, high = success(3, 4, 0.9).low, success(3, 4, 0.9).high
  assert low < 0.75 < high
  assert found == {
    "heldout_success": 0.75,
    "heldout_low": low,
    "heldout_high": high,
    "heldout_trials": 4,
    "heldout_reward": 0.25,
    "heldout_response_length": 12.5,
    "heldout_ungraded": 2,
    "heldout_skipped": 0,
  }


def test_one_that_only_follows_tells_its_leader_of_a_signal(monkeypatch):
  told = threading.Event()
  stop = mock.Mock()
  type(stop).requested = mock.PropertyMock(side_effect=told.set)
  channel = mock.Mock()
  channel.receive.side_effect = lambda: told.wait(10) and None  # the leader ends once it knows
  service = FollowingService(mock.Mock(spec=Engine, version=0, params={}), channel)
  monkeypatch.setattr(heldout, "place", lambda config: mock.Mock(follows=True))
  monkeypatch.setattr(heldout, "make_service", lambda *arguments, **options: service)
  assert evaluate(make_config(), None, 0, stop, share=DataShare(None, 1)).success.trials == 0
  assert told.is_set() and channel.close.called


def test_training_goes_on_while_a_version_is_evaluated(tmp_path, monkeypatch):
  """Here the evaluation of version 0 ends only after a later version was trained: waiting for it would never end."""
  trained = threading.Event()
  compiled = loop.CompiledSteps.__call__

  def step(self, state, rows, *, update_policy):
    state, metrics = compiled(self, state, rows, update_policy=update_policy)
    if int(state.policy_version) == 1:
      trained.set()
    return state, metrics

  def patient(config, params, version, interrupt):
    assert trained.wait(120)
    return evaluate(config, params, version, interrupt)

  monkeypatch.setattr(loop.CompiledSteps, "__call__", step)
  monkeypatch.setattr(pinned, "evaluate", patient)
  result = loop.train(make_config(checkpoint_every=10), tmp_path)
  assert result.step == 5 and result.evaluation.policy_version == 4
  found = evaluated(tmp_path)
  assert [(version, step) for version, (step, _) in found.items()] == [(0, 0), (2, 3), (4, 5)]
  for trajectory in result.evaluation.trajectories:
    assert set(np.unique(trajectory.policy_version[trajectory.action_mask])) == {4}


def test_an_interrupted_evaluation_is_begun_again(tmp_path, monkeypatch):
  def interrupted(config, params, version, interrupt):
    if version == 2:
      interrupt._interrupt.requested = True
      raise Interrupted("asked to stop")
    return evaluate(config, params, version, interrupt)

  monkeypatch.setattr(pinned, "evaluate", interrupted)
  config = make_config(checkpoint_every=1)
  first = loop.train(config, tmp_path)
  assert first.interrupted and list(evaluated(tmp_path)) == [0]
  monkeypatch.setattr(pinned, "evaluate", evaluate)
  second = loop.train(config, tmp_path)
  expected = [0, 2, 4] if first.step == 3 else [0, 4]  # it may have been noticed only after another step
  assert not second.interrupted and list(evaluated(tmp_path)) == expected


def test_an_error_of_an_evaluation_ends_the_run_as_itself(tmp_path, monkeypatch):
  def broken(config, params, version, interrupt):
    raise ZeroDivisionError("in the evaluation")

  monkeypatch.setattr(pinned, "evaluate", broken)
  with pytest.raises(ZeroDivisionError, match="in the evaluation"):
    loop.train(make_config(), tmp_path)


@pytest.mark.timeout(120)
def test_an_error_of_an_evaluation_ends_a_run_that_waits_for_a_batch(tmp_path, monkeypatch):
  """Here none ever comes: all episodes hang."""

  def broken(config, params, version, interrupt):
    raise ZeroDivisionError("in the evaluation")

  monkeypatch.setattr(pinned, "evaluate", broken)
  config = training_toy.replace(hanging_toy.get_config(), evaluation={"every": 2}, training={"audit": False})
  with pytest.raises(ZeroDivisionError, match="in the evaluation"):
    loop.train(config, tmp_path)


def test_a_stop_is_told_to_a_process_whose_share_of_an_evaluation_is_waited_for(monkeypatch):
  monkeypatch.setattr(agreement, "SLICE", 0.02)

  def slow(config, params, version, interrupt, share):
    deadline = time.monotonic() + 5
    while share.index and time.monotonic() < deadline:
      if interrupt.requested:
        raise Interrupted
      time.sleep(0.02)
    return Evaluation(success(0, 0, 0.9), 0.0, 0.0, 0, version, [])

  def wait(processes):
    signal = Interrupt()
    own = SharedStop(signal, processes), DataShare(processes.index, 2)
    with PinnedEvaluation(make_config(), own[0], processes=processes, share=own[1]) as evaluation:
      evaluation.start({}, 2, 3)
      if processes.index == 0:
        threading.Timer(0.1, lambda: setattr(signal, "requested", True)).start()
      evaluation.finish(2)
      return evaluation.version

  monkeypatch.setattr(pinned, "evaluate", slow)
  assert together(SharedStore(), 2, wait) == [2, 2]  # it was cut, and stays to be done


def test_what_was_trained_is_saved_when_an_evaluation_fails(tmp_path, monkeypatch):
  def broken(config, params, version, interrupt):
    if version == 4:
      raise ZeroDivisionError("in the last evaluation")
    return evaluate(config, params, version, interrupt)

  monkeypatch.setattr(pinned, "evaluate", broken)
  config = make_config(checkpoint_every=1000)
  with pytest.raises(ZeroDivisionError, match="in the last evaluation"):
    loop.train(config, tmp_path)
  assert phases.latest_step(tmp_path / "train") == 5
  monkeypatch.setattr(pinned, "evaluate", evaluate)
  assert loop.train(config, tmp_path).step == 5
  assert list(evaluated(tmp_path)) == [0, 2, 4]  # the one that was owed
  before = read_metrics(tmp_path)
  loop.train(config, tmp_path)
  assert read_metrics(tmp_path) == before  # nothing is owed any more


def test_an_interruption_while_training_waits_for_an_evaluation(tmp_path, monkeypatch):
  """The evaluation of version 1 is still running when that of version 2 is due; then comes the signal."""

  def slow(config, params, version, stop):
    if version == 1:
      threading.Timer(3.0, lambda: setattr(stop._interrupt, "requested", True)).start()
      while not stop.requested:
        time.sleep(0.01)
      raise Interrupted("asked to stop")
    return evaluate(config, params, version, stop)

  monkeypatch.setattr(pinned, "evaluate", slow)
  config = training_toy.replace(make_config(checkpoint_every=1000), evaluation={"every": 1})
  first = loop.train(config, tmp_path)
  assert first.interrupted and first.step == 3 and list(evaluated(tmp_path)) == [0]
  monkeypatch.setattr(pinned, "evaluate", evaluate)
  loop.train(config, tmp_path)
  assert list(evaluated(tmp_path)) == [0, 2, 3, 4]


def test_a_split_with_fewer_prompts_is_used_once_and_that_is_logged(caplog):
  config = training_toy.replace(make_config(), evaluation={"prompts": 100})
  learner = setup.make_learner(config)
  found = evaluate(config, sampler_side.make_publisher(learner)(setup.init_policy_params(learner, 0)), 0)
  assert found.success.trials == 64
  assert sum("has 64 prompts, not evaluation.prompts=100" in message for message in caplog.messages) == 1


def test_one_evaluation_at_a_time_and_none_outlives_its_run(monkeypatch):
  seen = []

  def endless(config, params, version, stop):
    while not stop.requested:
      pass
    seen.append(version)
    raise Interrupted("asked to stop")

  monkeypatch.setattr(pinned, "evaluate", endless)
  with pinned.PinnedEvaluation(make_config(), Interrupt()) as evaluation:
    assert evaluation.collect(1.0) is None and evaluation.version is None
    evaluation.start(None, 7, 3)
    with pytest.raises(RuntimeError, match="version 7 was not collected"):
      evaluation.start(None, 8, 4)
    assert evaluation.version == 7 and evaluation.collect() is None
  assert seen == [7]


def test_success_is_a_return_of_at_least_the_threshold(monkeypatch):
  rewards = (0.25, 0.5, 0.75, 1.0)
  episodes = [make_trajectory(number, reward=reward) for number, reward in enumerate(rewards)]
  monkeypatch.setattr(heldout, "make_service", lambda *args, **options: contextlib.nullcontext())
  monkeypatch.setattr(heldout, "run_episodes", lambda *args, **options: (episodes, []))
  rate = lambda **settings: evaluate(training_toy.replace(make_config(), evaluation=settings), None, 0).success.rate
  assert (rate(), rate(success_threshold=0.5), rate(success_threshold=-1.0)) == (0.25, 0.75, 1.0)


def test_an_evaluation_in_the_rollouts_slots_is_the_one_of_an_engine_of_its_own(monkeypatch):
  """Other turns of newer versions run in the same slots meanwhile; what it samples is the same, token for token."""
  config = training_toy.replace(make_config(), evaluation={"prompts": 6, "sampler": "shared"})
  learner = setup.make_learner(config)
  publish = sampler_side.make_publisher(learner)
  old, new = (publish(setup.init_policy_params(learner, seed)) for seed in (0, 1))
  own = evaluate(config, old, 3)

  with sampler_side.make_service(config, new, seed=5, version=8) as service:
    service.publish(new, 9)
    others = [
      service.submit(GenerateRequest(service.new_session(), rollout_id, (1, 2, 3), max_tokens=24))
      for rollout_id in range(2 * config.sampler.num_slots)
    ]
    shared = evaluate(config, old, 3, service=service)
    assert {int(v) for other in others for v in other.result(60).policy_versions} == {9}
  assert len(own.trajectories) == len(shared.trajectories) == 6
  for a, b in zip(own.trajectories, shared.trajectories):
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_allclose(a.behavior_logprobs, b.behavior_logprobs, atol=1e-5)
    assert set(b.policy_version[b.action_mask]) == {3}


@pytest.mark.parametrize("sampler", ["own", "shared"])
def test_the_setting_chooses_whose_slots_an_evaluation_takes(sampler, monkeypatch):
  given, service = [], object()
  monkeypatch.setattr(pinned, "evaluate", lambda *args, **options: given.append(options.get("service")))
  config = training_toy.replace(make_config(), evaluation={"sampler": sampler})
  with pinned.PinnedEvaluation(config, Interrupt(), last_version=4, service=service) as evaluation:
    evaluation.start(None, 2, 3)
    evaluation.collect(60)
  assert given == [service if sampler == "shared" else None]


@dataclasses.dataclass(frozen=True)
class Parity(training_toy.Parity):
  """The toy's game, under a name of its own."""


def test_a_run_of_two_environments_measures_each(tmp_path, one_device):
  parts = (Part(Parity("even"), 3, reward_scale=0.5), Part(Parity("odd/too"), 1))
  config = dataclasses.replace(make_config(), environment=Mixture(parts))
  loop.train(config, tmp_path)
  lines = read_metrics(tmp_path, "train")
  steps = [line for line in lines if "policy_grad_norm" in line]
  count = lambda name: sum(line.get(f"environment_trajectories/{name}", 0) for line in steps)
  assert count("even") + count("odd/too") == 4 * len(steps) and count("even") > count("odd/too") > 0
  assert max(line["environment_reward/even"] for line in steps if "environment_reward/even" in line) <= 0.5

  # Each held-out set by itself; rewards as the environment gave them.
  evaluated = next(line for line in lines if "heldout_success" in line)
  assert evaluated["heldout_trials"] == 6
  assert evaluated["heldout_trials/even"] == evaluated["heldout_trials/odd/too"] == 3
  rates = [evaluated[f"heldout_success/{name}"] for name in ("even", "odd/too")]
  assert np.mean(rates) == pytest.approx(evaluated["heldout_success"])
  assert evaluated["heldout_reward/even"] == rates[0]
  written = {key for line in lines for key in line}
  assert not [key for key in written if not any(fnmatch.fnmatch(key, name) for name in explained_metrics())]
