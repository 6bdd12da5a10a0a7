"""Questions that are answered with a Python tool: the policy writes code, sees what it gives, and answers in the end.

    system prompt, question             as of `QuestionAnswer`, with the tool
    thinking, call of `python`          one turn; variables live on to the next
    its output                          the tool's message
    thinking <answer>42</answer>        a turn without calls, which ends the episode

With the built-in tokenizer the conversation has its own short template, see `sao_jax.chat.byte_chat`, and the answer
stands behind <|answer|>.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from sao_jax.chat.byte_chat import ANSWER
from sao_jax.chat.call_formats import CallFormat, check_format, find_format, write_call
from sao_jax.chat.template import Message
from sao_jax.chat.tool_calls import ToolCall
from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.answers import read_answer
from sao_jax.environments.base import Demonstration
from sao_jax.environments.chat_environment import Reply
from sao_jax.environments.question_answer import QuestionAnswer
from sao_jax.environments.scripted_chat import scripted_chat
from sao_jax.environments.tool_environment import MAX_OUTPUT_TOKENS, ToolEnvironment, ToolError
from sao_jax.environments.tool_output import MIN_TOKENS
from sao_jax.episode import BadPrompt, InfrastructureFailure, Prompt
from sao_jax.errors import ConfigError
from sao_jax.rewards.answer_grader import PerEventLoop
from sao_jax.rewards.answer_text import without_thinking
from sao_jax.rewards.queueing import waiting
from sao_jax.sandbox.bubblewrap import LocalSandbox
from sao_jax.sandbox.bubblewrap_command import View, find_python
from sao_jax.sandbox.contract import DEFAULT_LIMITS, SandboxLimits
from sao_jax.sandbox.docker import DockerSandbox
from sao_jax.sandbox.python_session import PythonSession
from sao_jax.sandbox.sandbox_pool import SandboxPool

NAME = "python"
DESCRIPTION = (
  "Runs Python code in an interpreter that lives as long as this conversation: variables, functions and files stay. "
  "Returns what the code prints, and the value of a last expression."
)
CODE = {"type": "string", "description": "The code to run."}
PARAMETERS = {"type": "object", "properties": {"code": CODE}, "required": ["code"]}
TOOLS = [{"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}}]
TOOL_INSTRUCTION = f"You can run Python code with the tool {NAME}, as often as you like, before you answer."


@dataclasses.dataclass(frozen=True)
class PythonTool(QuestionAnswer):
  """Settings: those of `QuestionAnswer`, of the tool, and of the sandboxes in which it runs."""

  name: str = "python_tool"
  expert: str = ""  # field with the messages of an expert behind the question, for SFT; "": says the answer at once
  call_format: str = ""  # of sao_jax/chat/call_formats.py, "hermes" or "glm"; "": hermes, or the byte tokenizer's own
  call_timeout: float = 10.0  # seconds for one call; a longer one ends with its interpreter
  turn_timeout: float = 20.0  # for all calls of one turn; less than rollout.environment_timeout
  max_output_tokens: int = MAX_OUTPUT_TOKENS  # of one call; a longer output is cut in the middle
  rewrite: Literal["segment", "keep"] = "segment"  # where the template rewrites history, see sao_jax/chat
  sandbox: Literal["local", "docker"] = "local"  # bubblewrap, or containers of `image`
  image: str = ""
  tool_folders: tuple[str, ...] = ()  # that a local sandbox sees read-only, as a virtual environment with numpy
  python: str = ""  # the interpreter inside; "": of the first tool folder that has one, or python3
  sandboxes: int = 32  # at a time, in each event loop; an episode has one from its first call on
  warm: int = 2  # sandboxes that wait, started already
  limits: SandboxLimits = DEFAULT_LIMITS  # of each

  def __post_init__(self):
    super().__post_init__()
    # What a field may be, beside what the questions' fields may be.
    check_format(self.call_format, "environment.call_format")
    finite = lambda seconds: 0.0 < seconds < math.inf
    checks = (
      ("call_timeout", finite(self.call_timeout), "seconds above 0"),
      ("turn_timeout", finite(self.turn_timeout) and self.turn_timeout >= self.call_timeout, "call_timeout or more"),
      ("max_output_tokens", self.max_output_tokens >= MIN_TOKENS, f"at least {MIN_TOKENS}"),
      ("rewrite", self.rewrite in ("segment", "keep"), '"segment" or "keep"'),
      ("sandbox", self.sandbox in ("local", "docker"), '"local" or "docker"'),
      ("image", (self.sandbox == "docker") == bool(self.image), "an image with docker, and only there"),
      ("tool_folders", not (self.tool_folders and self.sandbox == "docker"), "an image that has what you need"),
      ("sandboxes", self.sandboxes >= 1, "at least 1"),
      ("warm", 0 <= self.warm <= self.sandboxes, "0 to sandboxes"),
    )
    for field, valid, remedy in checks:
      if not valid:
        raise ConfigError(f"environment.{field}", f"{getattr(self, field)!r} cannot work.", f"Use {remedy}.")

  @property
  def is_chat(self) -> bool:
    return True

  @property
  def instruction(self) -> str:
    """The system prompt; by default it names the tool and asks for tags. A tiny model learns what is wanted."""
    if self.system_prompt is not None:
      return self.system_prompt
    return f"{TOOL_INSTRUCTION} {super().instruction}".strip() if self.tokenizer_folder else ""

  @property
  def fields(self) -> dict[str, str]:
    return super().fields | ({"expert": self.expert} if self.expert else {})

  @functools.cached_property
  def pools(self) -> PerEventLoop[SandboxPool[PythonSession]]:
    """The sessions of each event loop."""
    return PerEventLoop(lambda: SandboxPool(self.start_session, size=self.sandboxes, warm=self.warm))

  async def start_session(self) -> PythonSession:
    """Starts a sandbox with an interpreter."""
    if self.sandbox == "docker":
      container = functools.partial(DockerSandbox.start, self.image, self.limits)
      return await PythonSession.start(container, python=self.python or "python3")
    view = View(read_only=self.tool_folders)
    start = functools.partial(LocalSandbox.start, self.limits, view)
    return await PythonSession.start(start, python=self.python or find_python(view))

  def check_sandbox(self) -> None:
    """Refuses, by ConfigError and before work starts, a machine where no sandbox can be made."""
    if self.sandbox == "local":
      LocalSandbox.check(View(read_only=self.tool_folders))
    else:
      DockerSandbox.check()

  def make(self, tokenizer: Tokenizer) -> PythonToolEpisode:
    return PythonToolEpisode(self)

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    self.check_sandbox()
    return super().prompts(tokenizer, split, seed)

  @property
  def found_format(self) -> CallFormat:
    """The format of tool calls that is spoken."""
    return find_format(self.call_format, self.renderer.tokenizer)

  def read_answer(self, said: str) -> str | None:
    """Returns the answer in what was said; None without one."""
    if self.answer_in == "reply":
      return without_thinking(said)
    if self.tokenizer_folder:
      return read_answer(said)
    _, found, answer = said.rpartition(ANSWER)
    return answer.strip() if found else None

  def demonstration(self, prompt: Prompt, tokenizer: Tokenizer, rng: np.random.Generator) -> Demonstration:
    """Says what an expert has said; without one in the data, the right answer at once."""
    opening = self.messages(prompt.data["question"])
    # An expert's reward is that of what it says last.
    if self.expert:
      script = self._script(prompt)
      reward = self.grading.score_now(self.read_answer(script[-1]["content"]), prompt)
    else:
      answer, reward = self.grading.demonstrate(prompt)
      tags = f"<answer>{answer}</answer>" if self.tokenizer_folder else f"{ANSWER}{answer}"
      script = [{"role": "assistant", "content": tags if self.answer_in == "tags" else answer}]
    return scripted_chat(self.renderer, [*opening, *script], reward, TOOLS)

  def _script(self, prompt: Prompt) -> list[Message]:
    """Reads the messages of an expert; calls beside a text, as OpenAI's API has them, become part of the text."""
    try:
      script = [self._turn(message) for message in prompt.data["expert"]]
      if [message["role"] == "assistant" for message in script[-1:]] != [True]:
        raise ValueError("the assistant does not speak last")
    except (TypeError, ValueError, KeyError, AttributeError) as error:
      problem = f"Record {prompt.key.id} of {prompt.key.environment} has no conversation of an expert: {error}"
      remedy = "Name a field with messages of assistant and tool, the assistant's last"
      raise BadPrompt("environment.expert", problem, remedy, reason="expert_unreadable") from error
    return script

  def _turn(self, message: Mapping[str, Any]) -> Message:
    """Reads one message of an expert's conversation; raises what is wrong with it."""
    role, said = message["role"], message.get("content") or ""
    if role not in ("assistant", "tool") or not isinstance(said, str):
      raise ValueError(f"a message of {role!r:.40} with the content {said!r:.40}")
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    for call in calls:
      arguments = call["arguments"]
      arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
      said += write_call(ToolCall(call["name"], arguments), self.found_format, TOOLS)
    return {"role": role, "content": said}


class PythonToolEpisode(ToolEnvironment):
  """One question, and an interpreter from the first call on.

  Attributes:
    texts: the answer, see `episode_texts`.
  """

  tools = TOOLS

  def __init__(self, settings: PythonTool):
    super().__init__(
      settings.name,
      settings.renderer,
      call_format=settings.call_format,
      max_output_tokens=settings.max_output_tokens,
      rewrite=settings.rewrite,
    )
    self._settings, self._ends = settings, 0.0  # when the time of this turn's calls ends
    self._python: PythonSession | None = None
    self._facts["interpreters_ended"] = 0.0
    self.texts: Mapping[str, str] = {}

  async def open(self, prompt: Prompt) -> Sequence[Message]:
    await self._settings.grading.check(prompt)
    self._prompt = prompt
    return self._settings.messages(prompt.data["question"])

  async def respond(self, said: str) -> Reply:
    self._ends = time.monotonic() + self._settings.turn_timeout
    return await super().respond(said)

  async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
    # A call that is late is the agent's fault, and costs it no more than that.
    left = self._ends - time.monotonic()
    if left <= 0.0:
      raise ToolError(f"Error: not run, since the calls of this turn have taken {self._settings.turn_timeout:g} s")
    try:
      if self._python is None:
        began = time.monotonic()
        with waiting():  # a sandbox that starts uses up nobody's time-out
          self._python = await self._settings.pools.get().acquire()
        self._ends += time.monotonic() - began
      # An interpreter that code has ended starts again in the time of the turn: to end many is no way out of it.
      result = await self._python.execute(arguments["code"], min(self._settings.call_timeout, left))
    except InfrastructureFailure as failure:
      raise InfrastructureFailure(self.name, failure.problem, retryable=failure.retryable) from failure

    self._facts["interpreters_ended"] += bool(result.ended_for)
    if result.failed:
      raise ToolError(result.text)
    return result.text

  async def finish(self, said: str) -> Reply:
    answer = self._settings.read_answer(said)
    self.texts = {} if answer is None else {"answer": answer}
    reward, facts = await self._settings.grading.grade(answer, self._prompt)
    return Reply(done=True, reward=reward, info={"answered": float(answer is not None), **facts})

  async def close(self) -> None:
    if self._python is not None:
      python, self._python = self._python, None
      await self._settings.pools.get().release(python)
