"""A phase begins with random numbers of its own, and goes on from nothing that belongs to another run or future."""

from __future__ import annotations

import itertools
import types

import jax
import jax.numpy as jnp
import pytest
from toys import training_toy, wiring
from toys.trajectories import make_trajectories

from sao_jax.checkpoints.checkpointer import Restored
from sao_jax.errors import ConfigError
from sao_jax.learner import setup
from sao_jax.training import phases
from sao_jax.training.consumed import Record


def seeded(seed):
  return training_toy.replace(training_toy.get_config(), training={"seed": seed})


def test_no_two_phases_runs_or_processes_draw_the_same_random_numbers():
  seeds = []
  for seed, phase in itertools.product((0, 1), phases.PHASES):
    seeds.append(phases.prompt_seed(seeded(seed), phase))
    seeds.extend(phases.sampler_seed(seeded(seed), phase, process) for process in (0, 1))
  assert len(set(seeds)) == len(seeds) == 2 * len(phases.PHASES) * 3
  assert all(0 <= seed < 2**31 for seed in seeds)


def test_processes_agree_on_the_order_of_prompts(monkeypatch):
  orders = []
  for process in (0, 1):
    monkeypatch.setattr(jax, "process_index", lambda process=process: process)
    orders.append(phases.prompt_seed(seeded(3), phases.TRAIN))
  assert orders[0] == orders[1]


@pytest.mark.parametrize("warm_up, goes_on", [(1, True), (0, False), (2, False), (9, False)])
def test_a_run_goes_on_with_the_warm_up_that_it_began_with(tmp_path, warm_up, goes_on):
  """After five steps, the first of the critic alone, the checkpoint has version 4."""
  config = training_toy.replace(training_toy.get_config(), algorithm={"critic_warmup_steps": warm_up})
  learner = setup.make_learner(config, tuple(jax.devices()[:1]))
  state = setup.abstract_state(learner).replace(policy_version=jnp.int32(4))
  checkpoint = newest(5, state, {"rollouts": "rollouts", "explained_variance": [0.0] * 5})
  going_on = lambda: phases.restore_or_begin(
    config, learner, tmp_path, phases.reinforcement_learning(config), checkpoint
  )
  if goes_on:
    start = going_on()
    assert (start.step, start.restored_step, start.rollouts, start.state) == (5, 5, "rollouts", state)
  else:
    with pytest.raises(ConfigError, match=r"version 4, not \d") as error:
      going_on()
    assert error.value.field == "algorithm.critic_warmup_steps"


def newest(step, state, host_state):
  """A checkpointer whose newest checkpoint is this."""
  return types.SimpleNamespace(restore=lambda abstract, **older: Restored(step, state, host_state))


def test_a_run_that_goes_on_forgets_what_later_steps_had_consumed(tmp_path):
  record, other = Record(tmp_path, "train"), Record(tmp_path, "value_pretraining")
  for step in range(1, 6):
    record.write(step, make_trajectories()[:1])
    other.write(step, make_trajectories()[:1])
  record.forget_after(3)
  assert record.missing(6) == [4, 5, 6] and other.missing(5) == []


def test_a_phase_forgets_them_even_if_it_records_nothing():
  config = training_toy.replace(training_toy.get_config(), training={"audit": False})
  calls = wiring.build(wiring.PRETRAIN, config)
  assert calls.of("Rollouts.record") == [None] and calls.of("forget_after.step") == [0]


@pytest.mark.parametrize("where", ["the step", "its end", "the next wait"])
def test_only_whole_steps_are_saved_when_something_fails(where):
  """The second step fails; up to its end nothing can be saved, and the first one was not due."""
  saved = wiring.failing_run(training_toy.replace(training_toy.get_config(), training={"audit": False}), where)
  assert saved == ([1] if where == "the next wait" else [])
