"""Environments of the real verifiers package, unchanged, as episodes of ours: turns, tools, rewards and failures."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import pickle
import sys
import types

import pytest
from toys.scripted_policy import WIDE, episode, play

from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.mixture import Mixture, Part
from sao_jax.episode import GraderFailure, InfrastructureFailure, Status
from sao_jax.errors import ConfigError
from sao_jax.gateway.exchange import ChatRequest, RequestRefused
from sao_jax.gateway.harness import HarnessFailure
from sao_jax.gateway.model_router import ModelRouter
from sao_jax.gateway.session_book import SessionBook
from sao_jax.gateway.verifiers_adapter import Verifiers
from sao_jax.gateway.verifiers_runner import failure_of, outcome

pytest.importorskip("verifiers.v1", reason="the extra `verifiers` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

TOYS = str(pathlib.Path(__file__).parents[1] / "toys")
HERE = {"runtime": {"type": "subprocess"}}
TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def make():
  """Makes settings, whose servers are stopped at the end; the toys are modules by themselves."""
  made = []

  def of(taskset: str, seat: str = "agent", fields=(), harness=None, **options) -> Verifiers:
    agent = HERE | dict(options.pop("agent", {})) | ({"harness": harness} if harness else {})
    environment = {"taskset": {"id": taskset, **dict(fields)}, seat: agent}
    made.append(Verifiers(environment, grace_seconds=options.pop("grace_seconds", 5.0), **options))
    return made[-1]

  sys.path.insert(0, TOYS)
  yield of
  sys.path.remove(TOYS)
  for settings in made:
    settings.close()


@pytest.fixture(scope="module")
def sums(make) -> Verifiers:
  return make("vf_sums")


def task_of(settings: Verifiers, number: int):
  """The prompt of a task by its number, in whichever split it is."""
  prompts = [*settings.prompts(TOKENIZER, "train", 0), *settings.prompts(TOKENIZER, "heldout", 0)]
  return next(prompt for prompt in prompts if prompt.data["task"] == number)


def test_one_turn_is_rewarded_by_the_rubric(sums):
  right = play(sums, task_of(sums, 7), lambda text: "8")
  assert (right.status, right.reward) == (Status.TERMINATED, 2.0)  # the reward's weight is 2
  assert TOKENIZER.decode(right.token_ids) == "<|bos|><|reserved_0|>Add.<|end|><|user|>7+1?<|end|><|assistant|>8<|end|>"
  assert right.info["reward_right"] == 1.0 and right.info["said"] == 1.0 and right.info["truncated"] == 0.0
  assert right.info["requests"] == 1.0 and right.info["overridden_requests"] == 0.0
  wrong = play(sums, task_of(sums, 7), lambda text: "nine")
  assert wrong.reward == 0.0 and wrong.info["said"] == 4.0 and wrong.info["reward_right"] == 0.0


def test_many_episodes_at_once_are_sessions_of_their_own(sums):
  prompts = sums.prompts(TOKENIZER, "train", 0)[:12]

  def answer(text: str) -> str:
    return str(int(text.rpartition("<|user|>")[2].partition("+")[0]) + 1)

  async def crowd():
    plays = (episode(sums.make(TOKENIZER), TOKENIZER, prompt, answer) for prompt in prompts)
    return await asyncio.gather(*plays)

  assert [trajectory.reward for trajectory in asyncio.run(crowd())] == [2.0] * 12


def test_an_environment_that_plays_the_user_is_a_conversation(make):
  settings = make("vf_guess", seat="player", max_tasks=12)
  turns = iter(["5", "7", "8"])
  trajectory = play(settings, task_of(settings, 7), lambda text: next(turns))
  told = "Game 7: 1 to 9?", "higher", "higher"
  expected = "".join(f"<|user|>{text}<|end|><|assistant|>{said}<|end|>" for text, said in zip(told, "578"))
  assert TOKENIZER.decode(trajectory.token_ids) == f"<|bos|>{expected}"
  assert trajectory.reward == 1.0 and len(trajectory.turn_starts) == 3 and trajectory.info["segments"] == 1.0
  assert trajectory.info["rounds"] == 3.0 and trajectory.info["reward_found"] == 1.0

  # A limit of theirs ends the episode in its way, with its rewards; one of ours cuts it.
  limited = make("vf_guess", seat="player", max_tasks=12, agent={"max_turns": 2})
  trajectory = play(limited, task_of(limited, 7), lambda text: "5")
  assert (trajectory.status, trajectory.reward, trajectory.info["truncated"]) == (Status.TERMINATED, 0.0, 1.0)
  cut = play(settings, task_of(settings, 7), lambda text: "5", limits=dataclasses.replace(WIDE, max_turns=2))
  assert (cut.status, cut.reward, len(cut.turn_starts)) == (Status.TRUNCATED_TURNS, 0.0, 2)


def test_its_own_harness_calls_tools(make, tmp_path, monkeypatch):
  # verifiers gets the interpreter of its programs from uv: here, this one, which has their packages.
  uv = tmp_path / "uv"
  uv.write_text(f'#!/bin/sh\ncase "$*" in *--help*) echo " --script";; "python find"*) echo {sys.executable};; esac\n')
  uv.chmod(0o755)
  monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
  monkeypatch.setenv("PYTHONPATH", TOYS, prepend=":")
  settings = make("vf_tools", harness={"id": "null"})

  def buy(text: str) -> str:
    return "7" if "observation" in text else "<|tool_call|>till_price pear<|tool_call|>till_price plum"

  trajectory = play(settings, task_of(settings, 0), buy)
  text = TOKENIZER.decode(trajectory.token_ids)
  assert trajectory.reward == 1.0 and trajectory.info["answers"] == 2.0 and trajectory.info["segments"] == 1.0
  assert "<|observation|>3<|end|><|observation|>4<|end|><|assistant|>7<|end|>" in text


def test_failures_have_types_and_are_never_a_reward(make):
  broken = make("vf_sums", fields={"breaks": "reward", "count": 3})
  with pytest.raises(GraderFailure, match="the rubric broke"):
    play(broken, task_of(broken, 1), lambda text: "2")
  unset = make("vf_sums", fields={"breaks": "setup", "count": 3})
  with pytest.raises(HarnessFailure, match="no table"):
    play(unset, task_of(unset, 1), lambda text: "2")


def episode_of(*traces, ok=True, errors=()):
  made = []
  for rewards, trainable in traces:
    numbers = {name: value and types.SimpleNamespace(score=value, value=value) for name, value in rewards.items()}
    seat = types.SimpleNamespace(trainable=trainable)
    facts = {"errors": [], "metrics": {"m": 1.0, "n": None}, "is_truncated": False, "stop_condition": "x"}
    total = sum(reward.value for reward in numbers.values() if reward)
    made.append(types.SimpleNamespace(rewards=numbers, agent=seat, reward=total, **facts))
  return types.SimpleNamespace(ok=ok, errors=list(errors), traces=made)


def test_the_outcome_of_several_seats():
  scored = outcome(episode_of(({"a": 1.0}, True), ({"a": 2.0, "b": 4.0}, True), ({"c": 9.0}, False)), "x")
  assert scored.reward == 3.5 and scored.info == {
    "m": 1.0,
    "reward_a": 1.5,
    "reward_b": 4.0,
    "truncated": 0.0,
    "traces": 2.0,
  }
  for traces, problem in (([({}, True)], "has no reward"), ([({"a": None}, True)], "no reward 'a'")):
    with pytest.raises(GraderFailure, match=problem):
      outcome(episode_of(*traces), "x")
  with pytest.raises(HarnessFailure, match="no seat"):
    outcome(episode_of(({"a": 1.0}, False)), "x")
  with pytest.raises(HarnessFailure, match="without an error"):
    outcome(episode_of(ok=False), "x")


@pytest.mark.parametrize(
  "kind, status, failure",
  [
    ("SandboxError", None, InfrastructureFailure),
    ("ProviderError", 503, InfrastructureFailure),
    ("ProviderError", 400, HarnessFailure),  # our own refusal
    ("HarnessError", None, HarnessFailure),
  ],
)
def test_errors_of_verifiers_are_failures_of_their_kind(kind, status, failure):
  error = types.SimpleNamespace(type=kind, message="it said so", status_code=status)
  made = failure_of(error, "x")
  assert type(made) is failure and "it said so" in str(made)


def test_tasks_are_split_by_their_content_or_by_a_held_out_environment(sums, make):
  train, heldout = (sums.prompts(TOKENIZER, split, 0) for split in ("train", "heldout"))
  assert len(train) + len(heldout) == 30 and heldout and pickle.loads(pickle.dumps(sums)) == sums
  shifted = make("vf_sums", fields={"first": 5, "count": 30})  # the same sums at other places
  held = {sums.runners["train"].content(prompt.data["task"]) for prompt in heldout}
  assert not held & {shifted.runners["train"].content(p.data["task"]) for p in shifted.prompts(TOKENIZER, "train", 0)}
  other = {"taskset": {"id": "vf_sums", "first": 90, "count": 2}, "agent": HERE}
  both = make("vf_sums", fields={"count": 3}, heldout=other)
  assert [len(both.prompts(TOKENIZER, split, 0)) for split in ("train", "heldout")] == [3, 2]
  assert play(both, both.prompts(TOKENIZER, "heldout", 0)[1], lambda text: "92").reward == 2.0


def test_it_is_part_of_a_mixture(sums):
  mixture = Mixture((Part(sums, reward_scale=0.25),))
  prompt = mixture.prompts(TOKENIZER, "train", 0)[0]
  assert play(mixture, prompt, lambda text: str(prompt.data["data"]["task"] + 1)).reward == 0.5


def test_a_model_that_is_no_session_is_refused():
  router = ModelRouter(SessionBook("key"))
  with pytest.raises(RequestRefused) as refused:
    asyncio.run(router.find("any").chat(ChatRequest(model="guessed", messages=({"role": "user", "content": "a"},))))
  assert refused.value.status == 401


@pytest.mark.parametrize(
  "options, problem",
  [
    ({"environment": {}}, "environment.environment"),
    ({"environment": {"taskset": {"id": "nowhere_at_all"}}}, "nowhere_at_all"),
    ({"environment": {"taskset": {"id": "vf_sums", "colour": 1}}}, "cannot load"),
    ({"environment": {"taskset": {"id": "vf_sums", "count": 0}}}, "is empty"),
    (
      {"environment": {"taskset": {"id": "vf_sums", "count": "3"}, "agent": {"harness": {"id": "none"}}}},
      "cannot load",
    ),
    ({"environment": {"a": 1}, "max_tasks": 0}, "environment.max_tasks"),
    ({"environment": {"a": 1}, "think_timeout": 0.0}, "environment.think_timeout"),
    ({"environment": {"a": 1}, "grace_seconds": -1.0}, "environment.grace_seconds"),
    ({"environment": {"a": 1}, "call_format": "xml"}, "environment.call_format"),
  ],
)
def test_what_cannot_work_is_refused_before_work_starts(make, options, problem):
  with pytest.raises(ConfigError, match=problem):
    Verifiers(**options).prompts(TOKENIZER, "train", 0)
