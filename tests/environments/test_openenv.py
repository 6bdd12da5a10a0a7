"""OpenEnv environments over loopback, served by that package's own code, and all that a server can do wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import pickle
import signal
import socket
import threading

import pytest
from toys.scripted_policy import WIDE, episode, play

from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.mixture import Mixture, Part
from sao_jax.environments.openenv_adapter import OpenEnv
from sao_jax.environments.openenv_server import OpenEnvServer
from sao_jax.environments.openenv_text import NoAction, action_reader, check_fields, observation_writer
from sao_jax.episode import EnvironmentFailure, GraderFailure, InfrastructureFailure, Status
from sao_jax.errors import ConfigError

pytest.importorskip("openenv", reason="the extra `openenv` is not installed")

TOYS = str(pathlib.Path(__file__).parents[1])
SCHEMA = {"properties": {"guess": {"type": "integer"}, "why": {"type": "string"}}, "required": ["guess"]}


@pytest.fixture(scope="module")
def settings():
  """The environment on a server that runs already: in a thread, since its package takes seconds to import."""
  uvicorn = pytest.importorskip("uvicorn")
  from toys.openenv_toy import app

  listener = socket.create_server(("127.0.0.1", 0))
  server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
  thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
  thread.start()
  url = f"http://127.0.0.1:{listener.getsockname()[1]}"
  yield OpenEnv(base_url=url, action="guess", num_prompts=9, sessions=2, system_prompt="")
  server.should_exit = True
  thread.join()


@pytest.fixture
def like(settings):
  """Makes settings that differ, on the same server."""
  return lambda **changes: dataclasses.replace(settings, **changes)


def prompt_of(settings: OpenEnv, index: int = 0):
  return settings.prompts(settings.tokenizer(), "train", 0)[index]


def bisection():
  low, high, last = 1, 9, None

  def guess(text: str) -> str:
    nonlocal low, high, last
    low = last + 1 if "higher" in text else low
    high = last - 1 if "lower" in text else high
    last = (low + high) // 2
    return str(last)

  return guess


def test_an_episode_is_a_session_of_the_server(settings):
  prompt = prompt_of(settings, 4)
  hidden = prompt.data["seed"] % 9 + 1
  trajectory = play(settings, prompt, bisection())
  turns = len(trajectory.turn_starts)
  assert trajectory.status is Status.TERMINATED and trajectory.reward == pytest.approx(1.0 + 0.1 * (turns - 1))
  assert trajectory.turn_rewards.tolist() == pytest.approx([0.1] * (turns - 1) + [1.0])
  assert trajectory.info["turns"] == turns and trajectory.info["action_errors"] == 0.0
  text = ByteTokenizer().decode(trajectory.token_ids)
  assert text.startswith("<|bos|><|user|>A number from 1 to 9.<|end|><|assistant|>")
  assert text.endswith(f"<|assistant|>{hidden}<|end|>")


def test_only_the_last_reward_may_count(like):
  settings = like(reward="last")
  trajectory = play(settings, prompt_of(settings), bisection())
  assert trajectory.reward == 1.0 and trajectory.turn_rewards is None


def test_actions_are_json_by_default_and_what_is_wrong_with_one_is_told(like):
  settings = like(action="", system_prompt=None)
  turns = iter(["five", '{"guess": 5', '{"number": 5}', '{"guess": "many"}', '<think>{}</think>ok {"guess": 2}.'])
  limits = dataclasses.replace(WIDE, max_turns=5)
  trajectory = play(settings, prompt_of(settings), lambda text: next(turns), limits=limits)
  text = ByteTokenizer().decode(trajectory.token_ids)
  assert 'with these fields, and nothing else: {"guess": {"type": "integer"}}' in text
  for problem in ("no JSON object", "no valid JSON", "'guess' is missing", "does not take these values"):
    assert text.count(problem) == 1
  assert trajectory.info["action_errors"] == 4.0 and trajectory.status is Status.TRUNCATED_TURNS
  assert trajectory.reward == pytest.approx(0.1)  # of the one step that there was, and 0 at the end


def test_functions_read_actions_and_show_observations(like):
  settings = like(action="toys.openenv_toy:read_guess", observation="toys.openenv_toy:show")
  turns = iter(["nonsense", "I say 5"])
  trajectory = play(
    settings, prompt_of(settings), lambda text: next(turns), limits=dataclasses.replace(WIDE, max_turns=2)
  )
  text = ByteTokenizer().decode(trajectory.token_ids)
  assert "A NUMBER FROM 1 TO 9." in text and "invalid literal" in text
  options = like(reset_options={"hidden": 3})
  assert play(options, prompt_of(options), lambda text: "3").reward == 1.0


def test_failures_of_the_server_are_typed_and_never_a_reward(like):
  settings = like(answer_timeout=0.5)
  prompt = prompt_of(settings)
  with pytest.raises(EnvironmentFailure, match="seventy-seven breaks it") as caught:
    play(settings, prompt, lambda text: "77")
  assert not caught.value.retryable
  with pytest.raises(InfrastructureFailure, match="not answered within 0.5 s"):
    play(settings, prompt, lambda text: "78")
  with pytest.raises(GraderFailure, match="without a reward"):
    play(settings, prompt, lambda text: "79")


def test_episodes_wait_for_a_place_and_for_a_full_server(like, settings):
  both = like(sessions=1)

  async def crowd(settings, count):
    tokenizer = ByteTokenizer()
    prompts = settings.prompts(tokenizer, "train", 0)
    plays = (episode(settings.make(tokenizer), tokenizer, prompts[i], bisection(), timeout=30) for i in range(count))
    return await asyncio.gather(*plays)

  assert len(asyncio.run(crowd(both, 6))) == 6
  # The server takes two at a time, whatever is asked of it: the others are refused, and come back.
  assert len(asyncio.run(crowd(like(sessions=5), 5))) == 5


@pytest.fixture
def light(monkeypatch):
  """Settings with a server of their own that speaks the protocol and starts at once."""
  monkeypatch.syspath_prepend(TOYS)
  made = OpenEnv(app="toys.plain_openenv:app", action="guess", num_prompts=2)
  yield made
  made.server.close()


def test_a_server_that_is_killed_costs_its_episodes_and_starts_again(light):
  prompt = prompt_of(light)
  url = light.server.url()

  def kill(text: str) -> str:
    os.kill(light.server._process.pid, signal.SIGKILL)
    light.server._process.wait()
    return "5"

  with pytest.raises(InfrastructureFailure, match="connection to its server was lost") as caught:
    play(light, prompt, kill)
  assert caught.value.retryable
  assert play(light, prompt, lambda text: "5").reward == 1.0 and light.server.url() != url


def test_a_server_dies_with_its_process(light):
  light.server.url()
  process = light.server._process
  process.stdin.close()  # as the kernel does for whoever dies
  assert process.wait(timeout=60) == 0


def test_it_is_part_of_a_mixture(settings):
  mixture = Mixture((Part(settings, reward_scale=0.5),))
  prompt = mixture.prompts(mixture.tokenizer(), "train", 0)[0]
  assert play(mixture, prompt, lambda text: str(prompt.data["data"]["seed"] % 9 + 1)).reward == 0.5
  assert pickle.loads(pickle.dumps(settings)) == settings


def test_a_server_that_cannot_start_or_be_reached_is_refused_before_work_starts(monkeypatch):
  monkeypatch.syspath_prepend(TOYS)
  for settings, problem in (
    (OpenEnv(app="nowhere_at_all:app"), "ended with status"),
    (OpenEnv(base_url="http://127.0.0.1:9"), "No OpenEnv server answers at 'http://127.0.0.1:9'"),
  ):
    with pytest.raises(ConfigError, match=problem) as refused:
      settings.prompts(ByteTokenizer(), "train", 0)
    assert "Fatal Python error" not in str(refused.value)  # the server's own words, and an end in order
  with pytest.raises(TimeoutError, match="did not answer"):
    OpenEnvServer("", "toys.plain_openenv:silent", 0.2).url()


@pytest.mark.parametrize(
  "options, field",
  [
    ({}, "base_url"),
    ({"app": "a:b", "base_url": "http://x"}, "base_url"),
    ({"app": "a"}, "app"),
    ({"app": "a:b", "reward": "sum"}, "reward"),
    ({"app": "a:b", "sessions": 0}, "sessions"),
    ({"app": "a:b", "answer_timeout": 0.0}, "answer_timeout"),
    ({"app": "a:b", "unfinished_reward": float("inf")}, "unfinished_reward"),
    ({"app": "a:b", "action": "math:pi"}, "action"),
    ({"app": "a:b", "observation": "math:nothing"}, "observation"),
  ],
)
def test_settings_that_cannot_work_are_refused(options, field):
  with pytest.raises(ConfigError, match=f"environment.{field}"):
    OpenEnv(**options)


def test_fields_are_read_as_their_types():
  read = action_reader("guess", "f")
  assert read(" 5 ", SCHEMA) == {"guess": 5} and action_reader("why", "f")("a b", SCHEMA) == {"why": "a b"}
  with pytest.raises(NoAction, match="no integer"):
    read("five", SCHEMA)
  for said in ("NaN", "-Infinity", "1e999"):
    with pytest.raises(NoAction, match="no number"):
      action_reader("x", "f")(said, {"properties": {"x": {"type": "number"}}})
  with pytest.raises(NoAction, match="no field 'x'"):
    check_fields({"guess": 1, "x": 2}, SCHEMA)
  for said in ("[1]", '{"a": NaN}', "{" * 9999, '{"a": "\\ud800"}'):
    with pytest.raises(NoAction):
      action_reader("", "f")(said, SCHEMA)
  assert observation_writer("", "f")({"a": 1, "b": "x"}) == '{"a": 1, "b": "x"}'
  assert observation_writer("b", "f")({"a": 1, "b": "x"}) == "x" and observation_writer("", "f")({"b": "x"}) == "x"
