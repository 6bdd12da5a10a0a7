"""Harnesses written against the openai client, and a sampler that says what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.server
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator

import numpy as np

from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.episode import Prompt, PromptKey, Trajectory
from sao_jax.gateway.agent import Agent
from sao_jax.gateway.sessions import AgentTask
from sao_jax.rollout.run_episode import EpisodeLimits, run_episode
from sao_jax.sampler.requests import Completion, GenerateRequest

LIMITS = EpisodeLimits(
  max_turns=8, max_tokens=200, max_tokens_per_turn=64, context_length=512, trajectory_length=4096, vocab_size=272
)
TOKENIZER = ByteTokenizer()


@dataclasses.dataclass(frozen=True)
class Tasks:
  """So many tasks, told apart by their number."""

  count: int = 8

  def prompts(self, tokenizer, split, seed):
    first = 0 if split == "train" else self.count
    return [Prompt(PromptKey("tasks", i, 0), {"number": first + i}) for i in range(self.count)]


def user(text: str) -> dict[str, str]:
  return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
  return {"role": "assistant", "content": text}


def ask(task: AgentTask, *messages: dict, retries: int = 0, **options) -> str:
  """One chat request; returns what was said."""
  import openai

  client = openai.OpenAI(base_url=task.base_url, api_key=task.key, max_retries=retries)
  answer = client.chat.completions.create(model=task.model, messages=messages, **options)
  return answer.choices[0].message.content


@contextlib.contextmanager
def losing_answers(base_url: str, lost: int) -> Iterator[str]:
  """A proxy that breaks so many connections once it has the whole answer; yields its base URL."""
  left = [lost]

  class Proxy(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      body = self.rfile.read(int(self.headers["content-length"]))
      headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
      request = urllib.request.Request(f"http://{host}{self.path}", body, headers, method="POST")
      with urllib.request.urlopen(request) as response:
        said = response.read()
      if left[0]:
        left[0] -= 1
        return
      self.send_response(200)
      self.send_header("Content-Type", "application/json")
      self.send_header("Content-Length", str(len(said)))
      self.end_headers()
      self.wfile.write(said)

    def log_message(self, *words):
      pass

  host = urllib.parse.urlsplit(base_url).netloc
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def count(task: AgentTask) -> float:
  """Two turns; the reward is the task's number."""
  said = ask(task, user("one"))
  ask(task, user("one"), assistant(said), user("two"))
  return float(task.data["number"])


async def count_together(task: AgentTask) -> float:
  """The same as a coroutine."""
  return await asyncio.to_thread(count, task)


class Played:
  """The harness of one test, by the name "toys.agent_toy:played": what the test has put there."""

  play: Callable[[AgentTask], float | None] = staticmethod(count)


def played(task: AgentTask) -> float | None:
  return Played.play(task)


class Speaker:
  """A sampler whose policy says one text after the other, the last one again and again.

  Attributes:
    requests: what was asked of it.
  """

  def __init__(self, *texts: str, before: Callable[[int], None] = lambda turn: None):
    """`before` is called with the number of a turn that is sampled."""
    self.requests: list[GenerateRequest] = []
    self._texts, self._before = texts or ("yes",), before

  async def generate(self, request: GenerateRequest) -> Completion:
    turn = len(self.requests)
    self.requests.append(request)
    await asyncio.to_thread(self._before, turn)
    said = TOKENIZER.encode_with_specials(f"{self._texts[min(turn, len(self._texts) - 1)]}<|end|>")
    ids = said[: request.max_tokens]
    reason = "stop" if len(ids) == len(said) else "length"
    return Completion(ids, np.full(len(ids), -0.5, np.float32), np.full(len(ids), turn, np.int32), reason)


async def episode(
  agent: Agent, speaker: Speaker, number: int = 0, limits: EpisodeLimits = LIMITS, timeout: float = 30.0
) -> Trajectory:
  """Plays one episode and closes it."""
  prompt = agent.prompts(agent.tokenizer(), "train", 0)[number]
  environment = agent.make(agent.tokenizer())
  try:
    return await run_episode(environment, prompt, speaker.generate, number, limits, session_id=number, timeout=timeout)
  finally:
    await environment.close()


def texts_of(trajectory: Trajectory) -> list[str]:
  """The text of every segment."""
  starts = [0] if trajectory.segment_starts is None else trajectory.segment_starts.tolist()
  ends = [*starts[1:], len(trajectory)]
  return [TOKENIZER.decode(trajectory.token_ids[start:end]) for start, end in zip(starts, ends)]


def grade(data: dict, messages: list[dict]) -> float:
  """A reward function: the task's number, and one more if the last turn says yes."""
  return float(data["number"] + (messages[-1]["content"] == "yes"))


def demonstrate(data: dict, rng: np.random.Generator) -> tuple[list[dict], None, float]:
  """The conversation of `count`."""
  return [user("one"), assistant("yes"), user("two"), assistant("no")], None, float(data["number"])
