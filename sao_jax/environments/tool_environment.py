"""Environments with tools: calls are read and answered in order, and a turn without any is the answer.

A subclass names its tools by JSON schemas and runs them; all that an agent can do wrong with a call is answered here,
as the result of that call, so that it can do better in its next turn.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from sao_jax.chat.call_formats import find_fault, find_format, parse_turn
from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.template import Message
from sao_jax.chat.tool_calls import ParseError, ToolCall
from sao_jax.environments.chat_environment import ChatEnvironment, Reply
from sao_jax.environments.tool_output import clip_tokens

MAX_OUTPUT_TOKENS = 2048  # of one call


class ToolError(Exception):
  """A call that failed by the agent's own fault; its text is the result that the agent sees."""


class ToolEnvironment(ChatEnvironment):
  """One conversation with tools as an episode. Subclasses have `tools`, and implement `open`, `call` and `finish`.

  >>> class Adder(ToolEnvironment):
  ...   tools = [{"type": "function", "function": {"name": "add", "parameters": {
  ...     "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}]
  ...
  ...   async def open(self, prompt):
  ...     return [{"role": "user", "content": "2+3?"}]
  ...
  ...   async def call(self, name, arguments):
  ...     return str(arguments["a"] + arguments["b"])
  ...
  ...   async def finish(self, said):
  ...     return Reply(done=True, reward=float(said == "5"))
  >>> from sao_jax.data.tokenizer import ByteTokenizer
  >>> from sao_jax.episode import Prompt, PromptKey
  >>> renderer = ChatRenderer(ByteTokenizer())
  >>> environment = Adder("adder", renderer)
  >>> said = lambda text: renderer.tokenizer.encode_with_specials(text + "<|end|>")  # sampled, in a real run
  >>> async def play():
  ...   await environment.reset(Prompt(PromptKey("adder", 0, 0), {}))
  ...   result = await environment.step(said('<|tool_call|>add {"a": 2, "b": 3}'))
  ...   print(renderer.tokenizer.decode(result.observation))
  ...   return await environment.step(said("5"))
  >>> result = asyncio.run(play())
  <|observation|>5<|end|><|assistant|>
  >>> result.reward, result.info["tool_calls"]
  (1.0, 1.0)

  Every turn tells in `info`: `turns`, `tool_calls`, those of them that failed by the agent's fault (`tool_errors`), and
  `tool_seconds`, all of the episode until then.
  """

  def __init__(
    self,
    name: str,
    renderer: ChatRenderer,
    *,
    call_format: str = "",
    max_output_tokens: int = MAX_OUTPUT_TOKENS,
    rewrite: str = "segment",
  ):
    """Prepares an episode.

    Args:
      name: the environment's.
      renderer: the tokenizer and chat template.
      call_format: a name of `sao_jax.chat.call_formats`; "": the tokenizer's own.
      max_output_tokens: tokens of one result; a longer one is cut in the middle.
      rewrite: as of `ChatSession`.
    """
    super().__init__(name, renderer, rewrite=rewrite)
    self.call_format = find_format(call_format, renderer.tokenizer)
    self._max_output_tokens = max_output_tokens
    self._facts = dict.fromkeys(("turns", "tool_calls", "tool_errors", "tool_seconds"), 0.0)

  @abc.abstractmethod
  async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Runs a tool, with arguments that fit its schema; returns its output.

    Raises:
      ToolError: it failed by the agent's fault.
      EnvironmentFailure: it failed by another fault; the episode is discarded.
    """

  @abc.abstractmethod
  async def finish(self, said: str) -> Reply:
    """Answers a turn without calls; usually it is the answer, and the episode is done."""

  async def respond(self, said: str) -> Reply:
    self._facts["turns"] += 1
    calls = parse_turn(said, self.call_format, self.tools or ()).calls
    if not calls:
      reply = await self.finish(said)
      return dataclasses.replace(reply, info=self._facts | reply.info)
    results = [await self._result(call) for call in calls]
    return Reply(results, info=dict(self._facts))

  async def answer(self, call: ToolCall | ParseError) -> str:
    """Runs one call; returns what the agent sees of it, in full length.

    Raises:
      ToolError: the call cannot be read, there is no such tool, its arguments do not fit, or the tool says so.
    """
    if isinstance(call, ParseError):
      raise ToolError(call.observation)
    fault = find_fault(call, self.tools or ())
    if fault:
      raise ToolError(f"Error: {fault}")
    return await self.call(call.name, call.arguments)

  async def _result(self, call: ToolCall | ParseError) -> Message:
    """Answers a call by a message, and counts it."""
    self._facts["tool_calls"] += 1
    began = time.monotonic()
    try:
      output = await self.answer(call)
    except ToolError as error:
      self._facts["tool_errors"] += 1
      output = str(error)
    finally:
      self._facts["tool_seconds"] += time.monotonic() - began
    # In a thread, because to count the tokens of a long output takes a while.
    clipped = await asyncio.to_thread(clip_tokens, output, self._renderer.tokenizer, self._max_output_tokens)
    named = {"name": call.name} if isinstance(call, ToolCall) else {}
    return {"role": "tool", "content": clipped, **named}
