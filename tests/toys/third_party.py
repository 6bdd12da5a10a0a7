"""Published agents as harnesses, unchanged: mini-swe-agent on a repository in a sandbox, and one of openai-agents.

Their policy is random, so its tokens are chosen such that it says something: some stand for whole tool calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np

from sao_jax.chat.conversation import ChatRenderer
from sao_jax.data.tokenizer import SPECIAL_PATTERN, SPECIALS, ByteTokenizer
from sao_jax.environments.repository_task import RepositoryTask
from sao_jax.gateway.agent import Agent
from sao_jax.gateway.repository_checkout import checked_out
from sao_jax.gateway.sessions import AgentTask

# Nothing is fetched, and nothing is written into a home.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}
os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_GLOBAL_CONFIG_DIR": tempfile.gettempdir()}

WORDS = 8  # ids of words, which say nothing
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
PHRASES = (
  *("5", "<|tool_call|>bash sed -i s/-/+/ m.py", "<|tool_call|>bash ls", f"<|tool_call|>bash {SUBMIT}"),
  *('<|tool_call|>add {"a": 2, "b": 3}', '<|tool_call|>add {"b": 1.0, "a": 2}', "<think>hm</think>", "5 "),
)
BRIEF = "Be brief."


class Phrases(ByteTokenizer):
  """Ids 0 ... 7 are words (any words), 8 ... 23 special tokens, 24 ... 31 phrases, which only a policy says."""

  vocab_size = WORDS + len(SPECIALS) + len(PHRASES)
  bos_id, end_id = (WORDS + SPECIALS.index(f"<|{name}|>") for name in ("bos", "end"))
  control_ids = frozenset(range(WORDS, WORDS + len(SPECIALS)))
  stop_ids, eos_id = (end_id, *range(WORDS + len(SPECIALS) - 4, WORDS + len(SPECIALS))), end_id

  def encode(self, text):
    return np.array([sum(word.encode()) % WORDS for word in text.split()], np.int32)

  def encode_with_specials(self, template, restore=str):
    ids = [
      np.array([WORDS + SPECIALS.index(text)], np.int32) if text in SPECIALS else self.encode(restore(text))
      for text in SPECIAL_PATTERN.split(template)
    ]
    return np.concatenate(ids)

  def decode(self, token_ids):
    texts = (*[" "] * WORDS, *SPECIALS, *PHRASES)
    return "".join(texts[token] for token in np.asarray(token_ids).tolist())


class PhrasesAgent(Agent):
  """An agent whose policy speaks phrases."""

  @functools.cached_property
  def _renderer(self) -> ChatRenderer:
    return ChatRenderer(Phrases())


RECORD = {
  "instance_id": "toy__m-1",
  "base_commit": "",
  "problem_statement": "Repair m.py",
  "snapshot": {
    "m.py": "def add(a, b):\n  return a - b\n",
    "tests/test_m.py": "from m import add\n\n\ndef test_add():\n  assert add(2, 3) == 5\n",
  },
  "test_patch": "",
  "FAIL_TO_PASS": ["tests/test_m.py::test_add"],
  "PASS_TO_PASS": [],
}

BASH = {"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}}
ADD = {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}
TOOLS = {"repair": [{"function": BASH}], "add_up": [{"function": ADD}], "claimed": None}

# The answers as the agents' own clients have read them, by the keys of their sessions.
answered: dict[str, list[Any]] = {}


def note(task: AgentTask, response: Any) -> Any:
  answered.setdefault(task.key, []).append(response.choices[0])
  return response


class Repositories:
  """The settings whose prompts `repair` works on; a test puts them there."""

  tasks: RepositoryTask


def repair(task: AgentTask) -> float:
  """mini-swe-agent with its own loop and model; its commands run in a sandbox, and hidden tests grade the result."""
  from minisweagent.agents.default import DefaultAgent
  from minisweagent.environments.local import LocalEnvironment
  from minisweagent.models.litellm_model import LitellmModel

  class Noting(LitellmModel):
    def _query(self, messages, **options):
      return note(task, super()._query(messages, **options))

  class InSandbox(LocalEnvironment):
    def execute(self, action, cwd="", *, timeout=None):
      result = checkout.run(action["command"])
      said = (result.stdout + result.stderr).decode(errors="replace")
      output = {"output": said, "returncode": result.exit_status, "exception_info": ""}
      self._check_finished(output)
      return output

  options = {"api_base": task.base_url, "api_key": task.key, "extra_body": {"return_token_ids": True}}
  model = Noting(model_name=f"openai/{task.model}", model_kwargs=options)
  templates = {"system_template": BRIEF, "instance_template": "{{task}}"}
  with checked_out(Repositories.tasks, task.data) as checkout:
    agent = DefaultAgent(model, InSandbox(), **templates, max_consecutive_format_errors=2)
    agent.run(task.data["problem_statement"])
    return checkout.judge()


def add_up(task: AgentTask) -> float:
  """An agent of openai-agents with one tool."""
  import agents
  import openai

  agents.set_tracing_disabled(True)

  @agents.function_tool
  def add(a: int, b: int) -> int:
    return a + b

  async def run():
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.key) as client:
      create = client.chat.completions.create

      async def noting(**options):
        return note(task, await create(**options))

      client.chat.completions.create = noting
      model = agents.OpenAIChatCompletionsModel(task.model, client)
      settings = agents.ModelSettings(extra_body={"return_token_ids": True})
      agent = agents.Agent(name="adder", instructions=BRIEF, tools=[add], model=model, model_settings=settings)
      return (await agents.Runner.run(agent, "2+3?", max_turns=3)).final_output

  try:
    return float("5" in asyncio.run(run()))
  except agents.AgentsException:  # a tool that there is not, too many turns
    return 0.0


@contextlib.contextmanager
def claiming(agent: Agent) -> Iterator[None]:
  """An agent that runs by itself, and claims one episode of these settings after the other."""
  import openai

  over = threading.Event()

  def post(url: str, key: str, body: dict) -> dict:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
      return json.load(response)

  def play(task: AgentTask) -> float:
    with openai.OpenAI(base_url=task.base_url, api_key=task.key) as client:
      messages = [{"role": "user", "content": "2+3?"}]
      ask = functools.partial(client.chat.completions.create, extra_body={"return_token_ids": True})
      said = note(task, ask(model=task.model, messages=messages)).choices[0].message.content
      messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Are you sure?"}]
      return float("5" in note(task, ask(model=task.model, messages=messages)).choices[0].message.content)

  def work() -> None:
    while not over.is_set():
      # None waits; or the episode was cut, and the run has gone on without its reward.
      with contextlib.suppress(urllib.error.HTTPError, openai.BadRequestError, openai.AuthenticationError):
        task = AgentTask(**post(f"{agent.gateway.url}/sessions", agent.gateway.key, {"wait": 0.5}))
        post(task.reward_url, task.reward_key, {"reward": play(task)})

  threads = [threading.Thread(target=work) for _ in range(4)]
  for thread in threads:
    thread.start()
  try:
    yield
  finally:
    over.set()
    for thread in threads:
      thread.join()
