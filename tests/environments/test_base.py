"""What an environment may return, and what importing these rooms costs."""

from __future__ import annotations

import asyncio
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from sao_jax.environments.base import (
  DemonstratingSpec,
  Environment,
  EnvironmentSpec,
  StepResult,
  check_step_result,
  check_token_ids,
)
from sao_jax.environments.calculator import Calculator
from sao_jax.environments.reasoning_gym import ReasoningGym
from sao_jax.environments.wrappers import SimulatedLatency
from sao_jax.episode import EnvironmentFailure, GraderFailure, InfrastructureFailure, Status

ROOT = pathlib.Path(__file__).parents[2]


def check(result):
  return check_step_result(result, environment="env", vocab_size=272)


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2], np.int64), np.array([1, 2], np.uint8)])
def test_valid_results_are_normalised(ids):
  result = check(StepResult(ids, False))
  assert result.observation.dtype == np.int32 and result.observation.tolist() == [1, 2]
  assert result.reward is None and result.done is False
  result = check(StepResult(ids, np.bool_(True), np.float32(0.5), {"calls": 2.0}))
  assert type(result.reward) is float and result.reward == 0.5 and result.done is True and result.info == {"calls": 2.0}


@pytest.mark.parametrize("empty", [[], (), np.zeros(0, np.int32), np.zeros(0, np.float32)])
def test_an_observation_may_be_empty(empty):
  assert check(StepResult(empty, False)).observation.dtype == np.int32


@pytest.mark.parametrize(
  "ids",
  [
    [272],
    [-1],
    [5, 10**12],
    [2**80],
    [0.5],
    [1.0],
    ["a"],
    "abc",
    None,
    3,
    [[1, 2]],
    [[1], [1, 2]],
    [None],
    [True, False],
  ]
  + [{1, 2}, np.zeros((0, 2), np.int32), np.array([np.nan])],
)
def test_garbage_observations_are_failures_with_the_environments_name(ids):
  with pytest.raises(EnvironmentFailure, match="'env'") as caught:
    check(StepResult(ids, False))
  assert caught.value.environment == "env" and not caught.value.retryable
  with pytest.raises(EnvironmentFailure, match="the prompt"):
    check_token_ids(ids, environment="env", vocab_size=272, what="the prompt")


@pytest.mark.parametrize("result", [None, ([1], False), {"observation": [1]}, StepResult, "done"])
def test_anything_but_a_step_result_is_a_failure(result):
  with pytest.raises(EnvironmentFailure, match="must return a StepResult"):
    check(result)


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, "1", True, [1.0]])
def test_done_without_one_finite_reward_is_a_failure_of_the_grader(reward):
  with pytest.raises(GraderFailure):
    check(StepResult([], True, reward))


@pytest.mark.parametrize("reward", [0.0, np.float32(0.5), -2])
def test_a_reward_may_come_with_any_turn(reward):
  result = check(StepResult([1], False, reward))
  assert type(result.reward) is float and result.reward == reward and not result.done


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1", True])
def test_a_reward_of_any_turn_is_one_finite_number(reward):
  with pytest.raises(GraderFailure):
    check(StepResult([1], False, reward))


@pytest.mark.parametrize("done", [None, 1, "yes", np.array([True])])
def test_done_must_be_a_boolean(done):
  with pytest.raises(EnvironmentFailure, match="done must be a boolean"):
    check(StepResult([1], done, 1.0))


def test_failures_say_whether_another_try_makes_sense():
  assert InfrastructureFailure("env", "no sandbox").retryable
  assert not EnvironmentFailure("env", "garbage").retryable
  assert not GraderFailure("env", "crash").retryable
  assert GraderFailure("env", "time-out", retryable=True).retryable


def test_defaults_of_the_protocol():
  class Minimal(Environment):
    name, stop_ids = "minimal", (1,)

  environment = Minimal()
  assert asyncio.run(environment.on_truncated(Status.TRUNCATED_TURNS)) == 0.0
  assert asyncio.run(environment.close()) is None


@pytest.mark.parametrize("settings", [Calculator(), ReasoningGym("chain_sum"), SimulatedLatency(Calculator())])
def test_the_built_in_environments_follow_the_protocols(settings):
  assert isinstance(settings, EnvironmentSpec) and isinstance(settings, DemonstratingSpec)
  environment = settings.make(settings.tokenizer())
  assert isinstance(environment, Environment) and environment.name == settings.name and environment.stop_ids


def run_python(code: str) -> str:
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return done.stdout.strip()


def test_environments_and_rewards_import_no_jax():
  rooms = ["environments", "rewards"]
  modules = [f"sao_jax.{room}.{path.stem}" for room in rooms for path in (ROOT / "sao_jax" / room).glob("*.py")]
  code = f"""
import importlib, sys
for name in {modules!r} + ["sao_jax.data.tokenizer", "sao_jax.data.prompts", "sao_jax.data.tfds_source"]:
  importlib.import_module(name)
print([name for name in sys.modules if name.partition(".")[0] in ("jax", "jaxlib", "flax", "grain", "reasoning_gym")])
"""
  assert run_python(code) == "[]"


def test_these_rooms_work_where_jax_cannot_be_imported():
  code = """
import asyncio, sys
sys.modules["jax"] = sys.modules["flax"] = None
from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.data import tfds_source
from sao_jax.environments.calculator import Calculator
from sao_jax.environments import reasoning_gym, wrappers
settings = Calculator(num_prompts=8)
tokenizer = settings.tokenizer()
prompt = next(make_prompt_iterator(settings.prompts(tokenizer, "train", 0), seed=0))
print(len(asyncio.run(settings.make(tokenizer).reset(prompt))) > 5)
"""
  assert run_python(code) == "True"
