"""Questions with a Python tool: played in real sandboxes, in every format, and as experts show it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import re

import numpy as np
import pytest
from toys import chat_toy, sandboxes
from toys.paths import REPOSITORY

from configs.python_tool import LargeNumbers, get_config
from sao_jax.chat.call_formats import write_call
from sao_jax.chat.tool_calls import ToolCall
from sao_jax.configuration.relations import validate
from sao_jax.data.prompts import split_of
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.answers import INSTRUCTION
from sao_jax.environments.python_tool import TOOLS, PythonTool
from sao_jax.environments.wrappers import SimulatedLatency
from sao_jax.episode import BadPrompt, InfrastructureFailure, Prompt, PromptKey, Status
from sao_jax.errors import ConfigError
from sao_jax.rollout.run_episode import EpisodeLimits, run_episode
from sao_jax.sampler.requests import Completion
from sao_jax.sandbox.python_session import CodeResult

TOKENIZER = ByteTokenizer()
PROMPT = Prompt(PromptKey("python_tool", 3, 0), {"question": "12*7?", "answer": 84})
WIDE = EpisodeLimits(9, 10**6, 10**6, 10**6, 10**6, 10**6)


@pytest.fixture(scope="module", autouse=True)
def needs_sandboxes():
  if sandboxes.missing():
    pytest.skip(sandboxes.missing())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  path = tmp_path_factory.mktemp("data") / "questions.jsonl"
  path.write_text(json.dumps({"question": "12*7?", "answer": 84}) + "\n", encoding="utf-8")
  return str(path)


@pytest.fixture(scope="module")
def settings(data):
  settings = PythonTool(data, scorer="integer", limits=sandboxes.SMALL, warm=0, grader_processes=1)
  yield settings
  settings.grading.pool.close()


def code(text: str, settings: PythonTool) -> str:
  return write_call(ToolCall("python", {"code": text}), settings.found_format, TOOLS)


def play(settings, turns, limits=WIDE, prompt=PROMPT, environment=None):
  """(trajectory, counts of the pool) of the episode in which the policy samples these texts, by the driver."""
  renderer, environment = settings.renderer, environment or settings.make(settings.tokenizer())
  end = renderer.turn_end_id
  waiting = iter([np.append(renderer.tokenizer.encode_with_specials(turn), end).astype(np.int32) for turn in turns])

  async def generate(request):
    ids = next(waiting)
    return Completion(ids, np.full(len(ids), -1.0, np.float32), np.zeros(len(ids), np.int32), "stop")

  async def run():
    pool = settings.pools.get()
    try:
      return await run_episode(environment, prompt, generate, 0, limits, session_id=0), pool.stats()
    finally:
      await environment.close()
      await environment.close()
      assert pool.stats()["lent"] == 0
      await pool.close()

  return asyncio.run(run())


def observed(trajectory, tokenizer=TOKENIZER) -> str:
  return tokenizer.decode(trajectory.token_ids[~trajectory.action_mask])


def test_variables_live_from_turn_to_turn_and_the_answer_is_graded(settings):
  turns = [code("n = 12", settings), code("n * 7", settings), "so<|answer|> 84"]
  trajectory, stats = play(settings, turns)
  assert observed(trajectory) == (
    "<|bos|><|reserved_1|>python(code)<|end|><|user|>12*7?<|end|><|assistant|>"
    "<|observation|>(no output)<|end|><|assistant|><|observation|>84<|end|><|assistant|>"
  )
  facts = {name: trajectory.info[name] for name in ("turns", "tool_calls", "tool_errors", "answered")}
  assert (trajectory.reward, trajectory.status) == (1.0, Status.TERMINATED)
  assert facts == {"turns": 3.0, "tool_calls": 2.0, "tool_errors": 0.0, "answered": 1.0}
  assert trajectory.info["tool_seconds"] > 0.0 and stats["asked"] == 1


@pytest.mark.parametrize("said, reward, answered", [("<|answer|>85", 0, 1), ("84", 0, 0), ("", 0, 0)])
def test_an_answer_that_is_wrong_or_none_earns_nothing_and_needs_no_sandbox(settings, said, reward, answered):
  environment = settings.make(TOKENIZER)
  trajectory, stats = play(settings, [said], environment=environment)
  assert (trajectory.reward, trajectory.info["answered"], stats["asked"]) == (reward, answered, 0)
  assert environment.texts == ({"answer": "85"} if answered else {})


@pytest.mark.parametrize("call_format", ["hermes", "glm"])
def test_a_folder_speaks_its_format_and_is_told_of_the_tool(data, tmp_path, call_format):
  pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")
  pytest.importorskip("jinja2", reason="the extra `hf` is not installed")
  folder = str(chat_toy.save_folder(tmp_path / "folder", chat_toy.THINKING))
  more = {"scorer": "integer", "warm": 0, "grader_processes": 1, "limits": sandboxes.SMALL}
  settings = PythonTool(data, tokenizer_folder=folder, call_format=call_format, rewrite="keep", **more)
  assert settings.instruction.endswith(INSTRUCTION) and "tool python" in settings.instruction
  product = code("n = 12\nn * 7", settings)
  turns = [
    f"<think>I compute.</think>{product}{code('n / 0', settings)}",
    "<think>perhaps <answer>3</answer></think><answer>84</answer>",
  ]
  trajectory, _ = play(settings, turns)
  assert trajectory.reward == 1.0 and trajectory.info["tool_errors"] == 1.0 and trajectory.info["tool_calls"] == 2.0
  text = observed(trajectory, settings.tokenizer())
  assert text.index("\n84\n") < text.index("ZeroDivisionError: division by zero")
  settings.grading.pool.close()


def test_what_ends_an_interpreter_is_told_and_counted(settings):
  settings = dataclasses.replace(settings, call_timeout=0.4)
  turns = [code("n = 12", settings), code("while True: pass", settings), code("n", settings), "<|answer|>84"]
  trajectory, _ = play(settings, turns)
  text = observed(trajectory)
  assert text.index("took more than 0.4 s. The interpreter is gone") < text.index("name 'n' is not defined")
  assert (trajectory.info["interpreters_ended"], trajectory.info["tool_errors"]) == (1.0, 2.0)
  settings.grading.pool.close()


def test_the_calls_of_a_turn_share_its_time(settings):
  """An agent cannot have an episode discarded by many slow calls: what is late is not run, by its own fault."""
  settings = dataclasses.replace(settings, call_timeout=0.3, turn_timeout=0.5)
  slow = code("while True: pass", settings)
  trajectory, _ = play(settings, [slow * 4, code("1", settings), ""])
  text = observed(trajectory)
  assert "more than 0.3 s" in text and text.count("Error: not run, since the calls of this turn") == 2
  assert trajectory.info["interpreters_ended"] == 2.0 and "<|observation|>1<|end|>" in text
  settings.grading.pool.close()


def test_interpreters_that_start_again_take_the_time_of_the_turn(settings):
  """Else an agent could have its episode discarded by many calls that each end an interpreter."""

  class Restarting:
    async def execute(self, code, timeout):
      await asyncio.sleep(0.3)  # an interpreter starts; the code itself takes no time
      return CodeResult("", "", "exit", "The interpreter is gone", 0.0)

    async def close(self):
      pass

  settings = dataclasses.replace(settings, call_timeout=0.4, turn_timeout=0.5)
  environment = settings.make(TOKENIZER)
  environment._python = Restarting()
  trajectory, _ = play(settings, [code("1", settings) * 6, ""], environment=environment)
  assert observed(trajectory).count("Error: not run") >= 4 and trajectory.info["interpreters_ended"] <= 2.0
  settings.grading.pool.close()


def test_a_long_output_is_cut_by_tokens(settings):
  settings = dataclasses.replace(settings, max_output_tokens=64)
  trajectory, _ = play(settings, [code("print('x' * 5000)", settings), ""])
  text = observed(trajectory)
  assert "tokens left out ...]" in text and 30 < text.count("x") < 40
  settings.grading.pool.close()


def test_turns_that_run_out_leave_the_facts(settings):
  limits = dataclasses.replace(WIDE, max_turns=2)
  trajectory, _ = play(settings, [code("1", settings)] * 2, limits)
  assert (trajectory.status, trajectory.reward) == (Status.TRUNCATED_TURNS, 0.0)
  assert trajectory.info["tool_calls"] == 2.0


def test_a_sandbox_that_fails_is_a_failure_of_the_infrastructure_under_the_environments_name(settings):
  broken = dataclasses.replace(settings, python="no-such-python")
  with pytest.raises(InfrastructureFailure, match="environment 'python_tool'.*no-such-python") as raised:
    play(broken, [code("1", settings)])
  assert raised.value.retryable
  broken.grading.pool.close()


def test_a_cancelled_episode_gives_its_sandbox_back(settings):
  async def run():
    environment, pool = settings.make(TOKENIZER), settings.pools.get()
    await environment.reset(PROMPT)
    step = environment.step(TOKENIZER.encode_with_specials(f"{code('while True: pass', settings)}<|end|>"))
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(step, 0.5)
    await environment.close()
    await pool.close()
    return pool.stats()

  assert asyncio.run(run())["lent"] == 0


def expert(*turns) -> Prompt:
  return dataclasses.replace(PROMPT, data=PROMPT.data | {"expert": list(turns)})


def test_an_expert_in_the_data_is_shown_as_its_episode(settings):
  settings = dataclasses.replace(settings, expert="messages")
  assert settings.fields["expert"] == "messages"
  call = {"type": "function", "function": {"name": "python", "arguments": '{"code": "12*7"}'}}
  shown = settings.demonstration(
    expert(
      {"role": "assistant", "content": None, "tool_calls": [call]},
      {"role": "tool", "content": "84"},
      {"role": "assistant", "content": "<|answer|>84"},
    ),
    TOKENIZER,
    np.random.default_rng(0),
  )
  played, _ = play(settings, [code("12*7", settings), "<|answer|>84"])
  assert shown.token_ids.tolist() == played.token_ids.tolist() and shown.reward == played.reward == 1.0
  assert shown.action_mask.tolist() == played.action_mask.tolist()
  wrong = settings.demonstration(expert({"role": "assistant", "content": "84"}), TOKENIZER, np.random.default_rng(0))
  assert wrong.reward == 0.0
  settings.grading.pool.close()


@pytest.mark.parametrize(
  "turns",
  [
    [],
    [{"role": "tool", "content": "84"}],
    [{"role": "user", "content": "?"}, {"role": "assistant", "content": "84"}],
    [{"role": "assistant", "tool_calls": [{"name": "python", "arguments": "{"}]}],
    ["84"],
  ],
)
def test_an_expert_who_cannot_be_read_is_skipped_by_name(settings, turns):
  settings = dataclasses.replace(settings, expert="messages")
  with pytest.raises(BadPrompt, match="Record 3 of python_tool has no conversation"):
    settings.demonstration(expert(*turns), TOKENIZER, np.random.default_rng(0))


def test_without_an_expert_the_right_answer_is_said_at_once(settings):
  shown = settings.demonstration(PROMPT, TOKENIZER, np.random.default_rng(0))
  assert TOKENIZER.decode(shown.token_ids[shown.action_mask]) == "<|answer|>84<|end|>" and shown.reward == 1.0


@pytest.mark.parametrize(
  "changes, field",
  [
    ({"call_timeout": 0.0}, "call_timeout"),
    ({"turn_timeout": 1.0}, "turn_timeout"),
    ({"max_output_tokens": 63}, "max_output_tokens"),
    ({"sandbox": "docker"}, "image"),
    ({"image": "python:3.12"}, "image"),
    ({"warm": 33}, "warm"),
    ({"call_format": "xml"}, "call_format"),
    ({"rewrite": "drop"}, "rewrite"),
    ({"scorer": "unknown"}, "scorer"),
  ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, changes, field):
  with pytest.raises(ConfigError, match=f"environment.{field}"):
    dataclasses.replace(settings, **changes)


def test_a_turn_of_tools_may_not_outlast_the_call_of_its_environment(settings):
  inner = dataclasses.replace(settings, turn_timeout=30.0)
  for environment, path in ((inner, "environment"), (SimulatedLatency(inner), "environment.inner")):
    config = dataclasses.replace(get_config(), environment=environment)
    with pytest.raises(ConfigError, match=f"(?s){path}.turn_timeout.*environment_timeout above"):
      validate(config, training=False)
    longer = dataclasses.replace(config.rollout, environment_timeout=31.0)
    validate(dataclasses.replace(config, rollout=longer), training=False)


def test_settings_travel_to_another_process_without_their_sandboxes(settings):
  assert settings.pools is settings.pools
  assert pickle.loads(pickle.dumps(settings)) == settings
  assert len(settings.prompts(TOKENIZER, "train", 0)) + len(settings.prompts(TOKENIZER, "heldout", 0)) == 1


def test_the_readme_has_a_configuration_that_works(data, tmp_path):
  text = (REPOSITORY / "sao_jax/environments/README.md").read_text(encoding="utf-8")
  (example,) = [block for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if "PythonTool(" in block]
  names = {}
  exec(compile(example, "README.md", "exec"), names)
  config = names["get_config"]()
  assert isinstance(config.environment, PythonTool) and config.rollout.max_turns == 50
  short = dataclasses.replace(config.environment, tokenizer_folder="")
  validate(dataclasses.replace(config, environment=short), training=False)


# --- The example's task ----------------------------------------------------------------------------------------------


def test_drawn_questions_have_right_answers_and_splits_apart():
  task = get_config().environment
  for split in ("train", "heldout"):
    prompts = task.prompts(TOKENIZER, split, 0)
    assert prompts[5] == prompts[5] != prompts[6]
    for index in range(20):
      data = prompts[index].data
      assignment, expression = data["question"].split(";")
      a = eval(assignment.removeprefix("a="))
      assert data["answer"] == eval(expression, {"a": a}) and split_of(data["question"]) == split


def test_the_experts_tool_says_what_the_real_one_does():
  task = LargeNumbers(limits=sandboxes.SMALL, warm=0, grader_processes=1)
  prompts, rewards, seen = task.prompts(TOKENIZER, "train", 0), [], set()
  for index in range(40):
    shown = task.demonstration(prompts[index], TOKENIZER, np.random.default_rng(index))
    rewards.append(shown.reward)
    text = TOKENIZER.decode(shown.token_ids[~shown.action_mask])
    kind = (shown.reward, "SyntaxError" in text, text.count("<|observation|>"))
    if kind in seen:
      continue
    seen.add(kind)
    said = TOKENIZER.decode(shown.token_ids[shown.action_mask]).removesuffix("<|end|>").split("<|end|>")
    played, _ = play(task, said, prompt=prompts[index])
    assert played.token_ids.tolist() == shown.token_ids.tolist() and played.reward == shown.reward
  assert len(seen) >= 5 and 0.3 < np.mean(rewards) < 0.7
  task.grading.pool.close()
