"""The phases end to end on a toy run: files, versions, resume, and equality with a synchronous loop written out."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import shutil

import jax
import numpy as np
import pytest
from absl import logging
from toys import training_toy
from toys.metrics_table import explained_metrics
from toys.runs import interrupted_after

from sao_jax.algorithm.train_step import make_train_step
from sao_jax.checkpoints.checkpointer import Checkpointer, load_host_state
from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.episode import EnvironmentFailure
from sao_jax.errors import ConfigError
from sao_jax.evaluation import fixed_policy
from sao_jax.learner import placement, sampler_side, setup
from sao_jax.learner.packing import pack, shard_batch
from sao_jax.report.metrics import read_metrics
from sao_jax.report.page import append_episode, read_episodes, write_report
from sao_jax.rollout.outcomes import EnvironmentDown
from sao_jax.sampler.slot_times import SLOT_STATES
from sao_jax.training import loop, phases, sft
from sao_jax.training.saver import Diverged
from sao_jax.training.step_metrics import WAITS


def leaves(tree):
  return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def one_device():
  """As on a machine with one device."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
    yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, one_device):
  """A workdir in which all three phases have run."""
  workdir = tmp_path_factory.mktemp("run")
  config = training_toy.replace(training_toy.get_config(), evaluation={"every": 4})
  sft.sft(config, workdir)
  loop.pretrain_value(config, workdir)
  result = loop.train(config, workdir)
  return config, workdir, result


def test_phases_build_on_each_other(finished):
  config, workdir, result = finished
  assert result.step == 5  # one critic-only step, four policy updates
  assert int(result.state.policy_version) == 4
  assert int(result.state.policy.step) == 4
  assert int(result.state.critic.step) == 5 * config.algorithm.value_updates
  assert [line["step"] for line in read_metrics(workdir, "sft")] == [1, 2, 3]
  assert [line["step"] for line in read_metrics(workdir, "value_pretraining")] == [1, 2]


def test_rl_starts_from_the_pretrained_networks_and_pretraining_leaves_the_policy_alone(finished):
  config, workdir, _ = finished
  learner = setup.make_learner(config)
  start = phases.initial_state(config, learner, workdir, phases.reinforcement_learning(config))
  imitated = phases.latest_policy(config, learner, workdir, "sft").params
  for a, b in zip(leaves(start.policy.params), leaves(imitated)):
    np.testing.assert_array_equal(a, b)
  assert np.abs(np.asarray(start.critic.params["value_head"])).max() > 0


def test_a_policy_that_a_run_beside_has_replaced_meanwhile_is_looked_for_again(finished, monkeypatch):
  config, workdir, result = finished
  learner, seen = setup.make_learner(config), [result.step, 2]
  monkeypatch.setattr(phases, "latest_step", lambda folder: seen.pop())
  assert phases.latest_policy(config, learner, workdir).checkpoint == str(workdir / "train" / str(result.step))
  seen.extend([3, 3])
  with pytest.raises((OSError, ValueError, KeyError)):  # it is the newest one, and damaged
    phases.latest_policy(config, learner, workdir)


def test_a_checkpoint_of_rl_knows_that_the_critic_was_pretrained(finished):
  _, workdir, result = finished
  assert phases.began_pretrained(load_host_state(workdir / "train", result.step))


def test_a_phase_says_from_what_it_begins_and_what_it_ignores(finished, tmp_path, caplog):
  """SFT that goes on after value pretraining does not reach RL, whose policy is the one that the critic belongs to."""
  config, workdir, _ = finished
  began_from = lambda phase, step: load_host_state(workdir / phase, step)[phases.POLICY_ORIGIN]
  assert (began_from("value_pretraining", 2), began_from("train", 5)) == ("sft/3", "value_pretraining/2")
  learner, phase = setup.make_learner(config), phases.reinforcement_learning(config)
  caplog.set_level("INFO", logger="absl")
  phases.initial_state(config, learner, workdir, phase)
  for network in ("policy", "critic"):
    assert f"The {network} begins from value_pretraining, step 2 (" in caplog.text
  assert not [record for record in caplog.records if record.levelname == "WARNING"]

  # Four steps of SFT where value pretraining has seen three.
  shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
  (tmp_path / "sft" / "3").rename(tmp_path / "sft" / "4")
  phases.initial_state(config, learner, tmp_path, phase)
  (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
  assert "value_pretraining began from sft/3, and today it would begin from sft, step 4" in said
  assert f"move {tmp_path / 'value_pretraining'} away and run launch.pretrain_value again" in said


def test_metrics_tell_what_happened(finished):
  config, workdir, _ = finished
  lines = [line for line in read_metrics(workdir, "train") if "policy_loss" in line]
  assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
  assert [line["policy_version"] for line in lines] == [0, 1, 2, 3, 4]
  assert lines[0]["policy_loss"] is None and lines[1]["policy_loss"] is not None
  places = ("in_flight", "buffered", "in_training")
  outcomes = (
    "failed_infrastructure",
    "failed_environment",
    "dropped_stale",
    "aborted",
    "trained",
    "masked",
    "filtered",
  )
  for line in lines:
    assert line["rollouts_submitted"] == sum(line[f"rollouts_{name}"] for name in places + outcomes)
    assert line["lag_max"] <= config.rollout.max_staleness
    assert line["lag_negative"] == 0
    assert 0 <= line["trainer_idle_fraction"] <= 1 and 0 <= line["place_idle_fraction"] <= 1
    assert line["trainer_idle_fraction"] == pytest.approx(sum(line[f"{name}_wait_fraction"] for name in WAITS))
    assert sum(line[f"sampler_{state}_fraction"] for state in SLOT_STATES) == pytest.approx(1.0)
    assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(line["num_trained_tokens"])
    assert line["trajectories_per_second"] > 0 and line["sampled_tokens_per_second"] >= 0
  assert lines[-1]["seconds"] == pytest.approx(sum(line["step_seconds"] for line in lines))
  evaluated = [line["policy_version"] for line in read_metrics(workdir, "train") if "heldout_success" in line]
  assert evaluated == [0, 4]


def test_every_number_that_a_run_writes_is_explained(finished):
  _, workdir, _ = finished
  written = {key for line in read_metrics(workdir) for key in line}
  assert {"sft_loss", "heldout_success", "rollouts_submitted", "explained_variance"} <= written
  assert not [key for key in written if not any(fnmatch.fnmatch(key, name) for name in explained_metrics())]


def test_the_run_can_be_reported(finished):
  _, workdir, _ = finished
  assert len(read_episodes(workdir)) >= 3
  page, *pictures = write_report(workdir)
  assert len(pictures) == 8 and all(picture.stat().st_size > 5000 for picture in pictures)
  assert "observation" in page.read_text()


def test_a_short_run_leaves_three_episodes_and_a_repeated_step_none_twice(tmp_path, one_device):
  config = training_toy.replace(training_toy.get_config(), training={"audit": False, "steps": 4, "checkpoint_every": 3})
  append_episode(tmp_path, "value_pretraining", 9, 0.0, "terminated", [("prompt", "earlier")])
  loop.train(config, tmp_path)
  steps = lambda: [episode["step"] for episode in read_episodes(tmp_path, "train")]
  assert steps() == [1, 2, 3, 4, 5]
  assert write_report(tmp_path)[0].read_text().count("<article>") == 3
  shutil.rmtree(tmp_path / "train" / "5")
  loop.train(config, tmp_path)
  assert steps() == [1, 2, 3, 4, 5]
  assert [episode["step"] for episode in read_episodes(tmp_path)].count(9) == 1


@pytest.mark.parametrize("asked_to_stop", [False, True])
def test_episodes_come_from_the_whole_run_and_its_end(tmp_path, one_device, asked_to_stop):
  config = training_toy.replace(
    training_toy.get_config(), training={"audit": False, "steps": 9, "checkpoint_every": 1000}
  )
  with interrupted_after(5) if asked_to_stop else contextlib.nullcontext():
    loop.train(config, tmp_path)
  assert [episode["step"] for episode in read_episodes(tmp_path)] == ([1, 3, 5] if asked_to_stop else [1, 3, 6, 9, 10])


def test_attention_of_the_critic_is_frozen_in_rl_and_trained_before(finished):
  config, workdir, result = finished
  learner = setup.make_learner(config)
  start = phases.initial_state(config, learner, workdir, phases.reinforcement_learning(config))
  imitated = phases.latest_policy(config, learner, workdir, "sft").params
  attention = lambda params: leaves(params["moe_layers"]["attention"])
  for before, after in zip(attention(start.critic.params), attention(result.state.critic.params)):
    np.testing.assert_array_equal(before, after)
  assert any(np.abs(a - b).max() > 0 for a, b in zip(attention(imitated), attention(start.critic.params)))
  moe = lambda params: leaves(params["moe_layers"]["moe"])
  assert any(np.abs(a - b).max() > 0 for a, b in zip(moe(start.critic.params), moe(result.state.critic.params)))


def test_a_finished_phase_stays_finished_and_says_so_before_anything_is_compiled(finished, monkeypatch):
  config, workdir, result = finished
  said = []
  monkeypatch.setattr(
    logging, "info", lambda message, *arguments: said.append(str(message) % arguments if arguments else "")
  )
  monkeypatch.setattr(loop, "CompiledSteps", lambda *_: pytest.fail("compiles"))
  again = loop.train(config, workdir)
  assert again.step == result.step and not again.interrupted
  assert f"train: all steps are done ({result.step}), there is nothing left to do." in said
  for a, b in zip(leaves(again.state), leaves(result.state)):
    np.testing.assert_array_equal(a, b)


def test_a_policy_of_another_run_brings_its_critic(finished, tmp_path):
  config, workdir, result = finished
  other = training_toy.replace(config, model={"checkpoint": str(workdir / "train")})
  learner, phase = setup.make_learner(other), phases.reinforcement_learning(other)
  begun = phases.initial_state(other, learner, tmp_path, phase)
  for name in ("policy", "critic"):
    for a, b in zip(leaves(getattr(begun, name).params), leaves(getattr(result.state, name).params), strict=True):
      np.testing.assert_array_equal(a, b)
  assert phases.critic_pretrained(other, tmp_path, phase) and not phases.critic_pretrained(config, tmp_path, phase)
  # Imitation has no critic; one with another head is no start.
  imitated = training_toy.replace(config, model={"checkpoint": str(workdir / "sft")})
  assert not phases.critic_pretrained(imitated, tmp_path, phase)
  bins = training_toy.replace(other, algorithm={"value_head": "hl_gauss"})
  with pytest.raises(ConfigError, match="(?s)model.checkpoint: the critic beside .* launch.convert_hf"):
    phases.initial_state(bins, setup.make_learner(bins), tmp_path, phase)


def test_a_checkpoint_of_another_model_is_refused(finished):
  config, workdir, _ = finished
  other = training_toy.replace(config, model={"d_ff_expert": 24})
  before = (workdir / "config.json").read_bytes()
  with pytest.raises(ValueError, match=r"(?s)checkpoint .*moe.*expected .*24.*remedy"):
    loop.train(other, workdir)
  assert (workdir / "config.json").read_bytes() == before  # what an export of the run reads


def synchronous(config, workdir, steps):
  """What SAO is without asynchrony: sample a batch with the newest weights, train on it, repeat."""
  learner = setup.make_learner(config)
  phase = phases.reinforcement_learning(config)
  state = phases.initial_state(config, learner, workdir, phase)
  publish = sampler_side.make_publisher(learner)
  source = config.environment.prompts(config.environment.tokenizer(), "train", config.training.seed)
  prompts = make_prompt_iterator(source, seed=phases.prompt_seed(config, phase.name))
  batch_size = config.rollout.batch_size
  train_steps = {
    update_policy: make_train_step(config.algorithm, learner.policy, learner.critic, update_policy=update_policy)
    for update_policy in (False, True)
  }
  with sampler_side.make_service(
    config, publish(state.policy.params), seed=phases.sampler_seed(config, phase.name)
  ) as service:
    for step in range(steps):
      batch_prompts = [next(prompts) for _ in range(batch_size)]
      trajectories, _ = fixed_policy.run_episodes(
        config, service, batch_prompts, temperature=1.0, first_rollout_id=step * batch_size
      )
      batch = pack(trajectories, config.rollout.row_lengths, config.rollout.row_counts)
      state, _ = train_steps[step >= phase.critic_steps](state, shard_batch(batch, learner.layout))
      service.publish(publish(state.policy.params), phase.version(step + 1))
  return state


def test_staleness_bound_zero_is_the_synchronous_loop(tmp_path, one_device):
  config = training_toy.replace(
    training_toy.get_config(), rollout={"admission_staleness": 0, "max_staleness": 0}, training={"audit": False}
  )
  result = loop.train(config, tmp_path)
  expected = synchronous(config, tmp_path, 5)
  for a, b in zip(leaves(result.state), leaves(expected)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  assert {line["lag_max"] for line in read_metrics(tmp_path, "train")} == {0}


def test_a_run_goes_on_where_it_stopped(tmp_path, one_device):
  config = training_toy.replace(training_toy.get_config(), training={"audit": False, "steps": 2})
  first = loop.train(config, tmp_path)
  config = training_toy.replace(config, training={"steps": 4})
  second = loop.train(config, tmp_path)
  assert (first.step, second.step) == (3, 5)
  assert int(second.state.policy_version) == 4
  lines = read_metrics(tmp_path, "train")
  assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
  assert lines[-1]["rollouts_trained"] + lines[-1]["rollouts_masked"] == 4 * 4  # the last batch is still in training
  with Checkpointer(tmp_path / "train") as checkpointer:
    assert checkpointer.latest_step() == 5


def test_a_demonstrations_mistakes_do_not_depend_on_its_question(tmp_path):
  """The question comes from (seed, index) too: were it the same stream, some questions would always go wrong."""
  from sao_jax.environments.calculator import Calculator

  config = dataclasses.replace(
    training_toy.replace(training_toy.get_config(), model={"vocab_size": 272}),
    environment=Calculator(),
  )
  config = training_toy.replace(config, sampler={"context_length": 200})
  demonstrations = sft.Demonstrations(config)
  tokenizer = config.environment.tokenizer()
  right = {True: [], False: []}
  for trajectory in demonstrations.batch(2000):
    question = tokenizer.decode(trajectory.token_ids).split("<|user|>")[1].split("<|end|>")[0]
    right[question[2] in "123"].append(trajectory.reward)
  assert min(len(rewards) for rewards in right.values()) > 300
  assert abs(np.mean(right[True]) - np.mean(right[False])) < 0.1


class Failing(training_toy.ParityEpisode):
  """Breaks for good after a number of episodes, which are counted over all instances."""

  episodes, limit = 0, 0

  async def reset(self, prompt):
    Failing.episodes += 1
    if Failing.episodes > Failing.limit:
      raise EnvironmentFailure(self.name, "the server has gone")
    return await super().reset(prompt)


@dataclasses.dataclass(frozen=True)
class FailingParity(training_toy.Parity):
  make = staticmethod(lambda tokenizer: Failing())


def test_what_was_trained_is_saved_when_the_rollout_side_fails(tmp_path, one_device, monkeypatch):
  config = training_toy.replace(
    training_toy.get_config(),
    training={"audit": False, "steps": 50, "checkpoint_every": 1000},
    rollout={"outage_seconds": 0.2},
  )
  config = dataclasses.replace(config, environment=FailingParity())
  monkeypatch.setattr(Failing, "limit", 64)  # the check of the prompts takes 32
  with pytest.raises(EnvironmentDown, match="the server has gone"):
    loop.train(config, tmp_path)
  trained = read_metrics(tmp_path, "train")[-1]["step"]
  assert trained >= 5
  monkeypatch.setattr(Failing, "limit", 10**9)
  config = training_toy.replace(config, training={"steps": trained})
  assert loop.train(config, tmp_path).step == trained + 1
  assert [line["step"] for line in read_metrics(tmp_path, "train")] == list(range(1, trained + 2))


def test_a_run_that_has_diverged_ends_and_goes_on_from_before(tmp_path, one_device, monkeypatch):
  """Whatever a step computes from the fifth on, its metrics say that its updates were not finite."""
  settings = {"audit": False, "steps": 50, "checkpoint_every": 2, "max_skipped_updates": 3}
  config = training_toy.replace(training_toy.get_config(), training=settings)
  compiled = loop.CompiledSteps.__call__

  def step(self, state, rows, *, update_policy):
    state, metrics = compiled(self, state, rows, update_policy=update_policy)
    return state, metrics | {"critic_updates_skipped": float(state.policy_version >= 4)}

  monkeypatch.setattr(loop.CompiledSteps, "__call__", step)
  with pytest.raises(Diverged, match="steps in a row were skipped.*last good checkpoint is that of step 4"):
    loop.train(config, tmp_path)
  assert phases.latest_step(tmp_path / "train") == 4
  lines = read_metrics(tmp_path, "train")
  assert [line["step"] for line in lines if line.get("alarms")] == [5]
  assert 7 <= lines[-1]["step"] <= 8  # metrics are read a step late
  monkeypatch.setattr(loop.CompiledSteps, "__call__", compiled)
  assert loop.train(training_toy.replace(config, training={"steps": 4}), tmp_path).step == 5
