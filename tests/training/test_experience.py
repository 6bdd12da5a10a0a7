"""The batches of value pretraining: demonstrations, fresh rollouts, passes over a bounded store; what is held out."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis
import jax
import numpy as np
import pytest
from absl import logging
from hypothesis import strategies as st
from toys import training_toy
from toys.runs import assert_identical
from toys.trajectories import make_trajectories

from sao_jax.checkpoints.checkpointer import load_host_state
from sao_jax.checkpoints.host_state import decode, encode
from sao_jax.episode import PromptKey
from sao_jax.errors import ConfigError
from sao_jax.learner import placement, setup
from sao_jax.learner.packing import pack
from sao_jax.report.metrics import read_metrics
from sao_jax.training import loop, phases
from sao_jax.training.demonstrations import Demonstrations
from sao_jax.training.experience import Experience, Store, is_heldout, make_experience
from sao_jax.training.heldout_critic import heldout_variance, make_reader

TRAJECTORIES = make_trajectories()
FRACTION = 0.5
SETTINGS = {
  "demonstration_steps": 2,
  "min_steps": 0,
  "max_steps": 40,
  "passes": 3,
  "heldout_fraction": FRACTION,
  "evaluate_every": 2,
  "plateau_window": 2,
  "patience": 2,
  "plateau_gain": 1e6,
}


def numbered(count):
  """Trajectories of so many prompts."""
  keys = (PromptKey("parity", number, 0) for number in range(count))
  return [dataclasses.replace(TRAJECTORIES[key.id % 24], key=key, rollout_id=key.id) for key in keys]


def test_a_prompt_is_held_out_for_ever_and_as_often_as_asked():
  keys = [PromptKey("parity", number, 0) for number in range(4000)]
  held = [is_heldout(key, 0.2) for key in keys]
  assert 0.17 < np.mean(held) < 0.23
  assert held == [is_heldout(key._replace(epoch=7), 0.2) for key in keys]
  assert not any(is_heldout(key, 0.0) for key in keys)
  assert all(is_heldout(key, 0.4) for key, before in zip(keys, held) if before)


@hypothesis.given(st.integers(4, 40), st.lists(st.integers(0, 20), max_size=8), st.sampled_from([0.0, 0.25, 0.5]))
def test_the_store_is_bounded_and_keeps_what_is_new_and_what_is_held_out(size, batches, fraction):
  store, arrived = Store(size, fraction), numbered(sum(batches))
  queue = iter(arrived)
  for count in batches:
    store.add(list(itertools.islice(queue, count)))

  trained = [t for t in arrived if not is_heldout(t.key, fraction)]
  heldout = [t for t in arrived if is_heldout(t.key, fraction)]
  most_heldout = round(size * fraction)
  assert store.heldout == heldout[:most_heldout]  # the first ones
  drawn = store.draw(len(arrived) + 1, np.random.default_rng(0))
  assert {t.rollout_id for t in drawn} == {t.rollout_id for t in trained[-(size - most_heldout) :]}  # the newest ones
  assert len(store) == len(drawn) and len(store) + len(store.heldout) <= size


def test_the_settings_of_the_store_reach_it():
  config = make_config(store_trajectories=48, heldout_fraction=FRACTION)
  experience = Experience(None, setup.make_learner(config, tuple(jax.devices()[:1])))
  experience.store.add(numbered(400))
  assert (len(experience.store), len(experience.heldout)) == (24, 24)


def test_the_store_survives_a_checkpoint():
  store, other = Store(16, FRACTION), Store(16, FRACTION)
  store.add(numbered(30))
  other.add(numbered(3))
  other.load_state_dict(*decode(encode(list(store.state_dict()))))
  for a, b in zip([*store.heldout, *store._trained], [*other.heldout, *other._trained], strict=True):
    assert (a.key, a.reward, a.rollout_id) == (b.key, b.reward, b.rollout_id)
    np.testing.assert_array_equal(a.token_ids, b.token_ids)


def test_the_store_keeps_no_recorded_experts():
  """A model of many layers records a hundred times the bytes of a token, and the critic does not read them."""
  experts = lambda t: np.zeros((len(t), 2, 1), np.int16)
  store = Store(16, FRACTION)
  store.add([dataclasses.replace(t, routed_experts=experts(t)) for t in numbered(30)])
  assert store.heldout and all(
    t.routed_experts is None for t in [*store.heldout, *store.draw(16, np.random.default_rng(0))]
  )


def test_demonstrations_leave_out_what_is_held_out():
  config = training_toy.get_config()
  demonstrations = Demonstrations(config, phases.VALUE_PRETRAINING, leave_out=lambda key: is_heldout(key, 0.5))
  keys = {t.key.id for t in demonstrations.batch(200)}
  assert len(keys) > 16 and not any(is_heldout(PromptKey("parity", number, 0), 0.5) for number in keys)


def test_explained_variance_of_what_is_held_out_is_that_of_all_its_tokens():
  """A batch at a time, against one plain formula."""
  learner = setup.make_learner(training_toy.get_config(), tuple(jax.devices()[:1]))
  params = setup.init_sharded(learner.critic.specs, learner.layout, 3)
  params["value_head"] = params["value_head"] + 0.1
  seen, read = [], make_reader(learner)

  def reading(params, rows):
    seen.append(jax.device_get(read(params, rows)))
    return seen[-1]

  got = heldout_variance(learner, reading, params, TRAJECTORIES[:10])
  values, targets, mask = (np.concatenate([part[i].ravel() for part in seen]) for i in range(3))
  assert len(seen) == 3 and mask.sum() == sum(t.num_sampled for t in TRAJECTORIES[:10])
  rewards = np.repeat([t.reward for t in TRAJECTORIES[:10]], [t.num_sampled for t in TRAJECTORIES[:10]])
  assert sorted(targets[mask]) == sorted(rewards)
  np.testing.assert_allclose(got, 1 - np.var((targets - values)[mask]) / np.var(rewards), rtol=1e-5)
  assert np.isnan(heldout_variance(learner, read, params, [dataclasses.replace(TRAJECTORIES[0], reward=1.0)]))


def test_what_is_held_out_is_read_in_micro_batches():
  """Also a batch of more rows than are configured: it needs no more memory for activations than a train step."""
  config = training_toy.replace(training_toy.get_config(), algorithm={"micro_batches": 4})
  learner, seen = setup.make_learner(config, tuple(jax.devices()[:1])), []

  def apply(params, rows):
    seen.append(rows.token_ids.shape[0])
    return jax.numpy.zeros((*rows.token_ids.shape, 1))

  read = make_reader(dataclasses.replace(learner, critic=dataclasses.replace(learner.critic, apply=apply)))
  for count in (8, 16):
    rows = pack(numbered(2), (32,), (count,))
    jax.eval_shape(read, {}, rows)
  assert seen == [2, 2]


@dataclasses.dataclass(frozen=True)
class OnePrompt(training_toy.Parity):
  """A data set of one prompt."""

  def prompts(self, tokenizer, split, seed):
    return super().prompts(tokenizer, split, seed)[:1]


@pytest.mark.parametrize("fraction, refused", [(0.99, True), (0.01, False)])
def test_prompts_that_are_all_held_out_are_refused_and_none_is_said(monkeypatch, fraction, refused):
  said = []
  monkeypatch.setattr(logging, "warning", lambda message, *arguments: said.append(message % arguments))
  config = dataclasses.replace(training_toy.get_config(), environment=OnePrompt())
  config = training_toy.replace(config, value_pretraining={"heldout_fraction": fraction})
  learner = setup.make_learner(config, tuple(jax.devices()[:1]))
  if refused:
    with pytest.raises(ConfigError, match=r"(?s)heldout_fraction.*all of these 1.*Set it to 0"):
      make_experience(learner, lambda is_heldout: None, 0)
  else:
    make_experience(learner, lambda is_heldout: None, 0)
    assert "holds out none of these 1 prompts" in said[0]


def make_config(**changes):
  return training_toy.replace(
    training_toy.get_config(),
    value_pretraining=SETTINGS | changes,
    rollout={"deterministic": True, "batch_size": 8},
    training={"audit": False, "checkpoint_every": 1000},
  )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """One run to its end, and one that was interrupted in a pass over the store and went on."""
  workdirs = [tmp_path_factory.mktemp(name) for name in ("whole", "resumed")]
  calls, take = itertools.count(), Experience.take

  def take_and_stop(experience, version):
    experience.interrupt.requested = next(calls) == 7
    return take(experience, version)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
    whole = loop.pretrain_value(make_config(), workdirs[0])
    with pytest.MonkeyPatch.context() as stopping:
      stopping.setattr(Experience, "take", take_and_stop)
      assert loop.pretrain_value(make_config(), workdirs[1]).step == 7
    yield workdirs, whole, loop.pretrain_value(make_config(), workdirs[1])


def test_it_ends_at_the_plateau(runs):
  """Measured after every second step from the first rollouts on: after four of them there is no gain of a million."""
  workdirs, whole, _ = runs
  assert (whole.step, whole.interrupted) == (10, False)
  measured = [line for line in read_metrics(workdirs[0]) if phases.HELDOUT_VARIANCE in line]
  assert [line["step"] for line in measured] == [4, 6, 8, 10]
  assert [line["heldout_trajectories"] for line in measured] == sorted(
    line["heldout_trajectories"] for line in measured
  )


def test_a_resumed_run_is_the_uninterrupted_one(runs):
  workdirs, whole, resumed = runs
  assert resumed.step == whole.step
  assert_identical(whole.state, resumed.state)
  states = [load_host_state(workdir / phases.VALUE_PRETRAINING, whole.step) for workdir in workdirs]
  assert states[0][phases.HELDOUT_VARIANCE] == states[1][phases.HELDOUT_VARIANCE] and len(
    states[0]["rollouts"][0]["store"]
  )
  for name, array in states[0]["rollouts"][1]["store"].items():
    np.testing.assert_array_equal(array, states[1]["rollouts"][1]["store"][name])


def test_every_rollout_is_accounted_for_and_costs_several_steps(runs):
  """Ten steps: two on demonstrations, then three fresh batches of eight, the others on the store."""
  workdirs, _, _ = runs
  lines = [line for line in read_metrics(workdirs[0]) if "rollouts_submitted" in line]
  assert [line["step"] for line in lines] == list(range(1, 11))
  assert {line["lag_max"] for line in lines} == {0}
  last = lines[-1]
  consumed = last["rollouts_trained"] + last["rollouts_masked"] + last["rollouts_in_training"]
  assert consumed == 3 * 8
  parts = [value for name, value in last.items() if name.startswith("rollouts_") and isinstance(value, int | float)]
  assert 2 * last["rollouts_submitted"] == sum(parts)

  # What is held out was handed out with all of its tokens masked.
  state = load_host_state(workdirs[0] / phases.VALUE_PRETRAINING, 10)["rollouts"][0]
  held = [record for record in state["store"] if is_heldout(PromptKey(*record["key"]), FRACTION)]
  assert len(state["store"]) == 3 * 8
  assert len(held) == lines[-1]["rollouts_masked"] > 0


def test_nothing_is_expected_to_grow_old_under_a_policy_that_never_changes(runs):
  workdirs, _, _ = runs
  lines = [line for line in read_metrics(workdirs[0]) if "rollouts_submitted" in line]
  assert {line["rollouts_dropped_stale"] for line in lines} == {0}
  assert not any(name.startswith("expected_") for line in lines for name in line)


def test_it_stays_ended_and_training_knows(runs, monkeypatch):
  (workdir, _), whole, _ = runs
  before = read_metrics(workdir)
  assert loop.pretrain_value(make_config(), workdir).step == whole.step and read_metrics(workdir) == before

  said = []
  monkeypatch.setattr(logging, "warning", lambda message, *arguments: said.append(message % arguments))
  learner = setup.make_learner(make_config())
  for changes, told in [({}, 0), ({"max_steps": 10, "min_steps": 10}, 0), ({"min_steps": 30}, 1)]:
    later = make_config(**changes)
    phases.initial_state(later, learner, workdir, phases.reinforcement_learning(later))
    assert len(said) == told
  assert "Value pretraining stopped at step 10 of at most 40" in said[0] and "launch.pretrain_value" in said[0]


def test_a_state_of_rollouts_alone_fills_a_new_store(runs):
  """As in checkpoints of 0.1.0."""
  (workdir, _), _, _ = runs
  state, arrays = load_host_state(workdir / phases.VALUE_PRETRAINING, 10)["rollouts"]
  loaded = []
  rollouts = type("Fake", (), {"load_state_dict": lambda self, *given: loaded.append(given)})()
  experience = Experience(rollouts, setup.make_learner(make_config()), first_step=10)
  experience.load_state_dict(state["rollouts"], arrays["rollouts"])
  assert loaded == [(state["rollouts"], arrays["rollouts"])] and not len(experience.store)
