"""Environments that speak text: messages in, messages out; the chat template makes token ids of them.

What the policy sampled is kept id by id, see `sao_jax.chat.conversation`. A subclass opens an episode with
messages and answers what the assistant said; tool calls in it are read by `sao_jax.chat.tool_calls`.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from sao_jax.chat.conversation import ChatRenderer, ChatSession, Tools
from sao_jax.chat.template import Message
from sao_jax.environments.base import Environment, StepResult
from sao_jax.episode import Prompt


@dataclasses.dataclass(frozen=True)
class Reply:
  """What a chat environment answers to one turn.

  Attributes:
    messages: what to append, at least one unless done: tool results, a user's message.
    done: whether the episode has ended.
    reward: the reward of the whole episode; required when done, None otherwise.
    info: small facts for logs, name -> number.
  """

  messages: Sequence[Message] = ()
  done: bool = False
  reward: float | None = None
  info: dict[str, float] = dataclasses.field(default_factory=dict)


class ChatEnvironment(Environment):
  """One conversation as an episode. Subclasses implement `open` and `respond`.

  A template that rewrites history (it drops earlier thinking, say) begins a new context, see `StepResult`; with
  `rewrite="keep"` the policy goes on seeing what it wrote.

  Attributes:
    tools: JSON schemas for the template, set before `open` returns.
  """

  tools: Tools = None

  def __init__(self, name: str, renderer: ChatRenderer, *, rewrite: str = "segment"):
    """`rewrite` is that of `ChatSession`."""
    self.name, self.stop_ids = name, renderer.stop_ids
    self._renderer, self._rewrite = renderer, rewrite
    self._session: ChatSession | None = None
    self._deviations = 0  # turns behind which the context was not what the template makes of the conversation

  @abc.abstractmethod
  async def open(self, prompt: Prompt) -> Sequence[Message]:
    """Starts an episode; returns the messages before the first turn."""

  @abc.abstractmethod
  async def respond(self, said: str) -> Reply:
    """Answers one turn of the assistant, thinking and tool calls included as text."""

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    messages = await self.open(prompt)
    self._session = await asyncio.to_thread(self._renderer.start, messages, self.tools, rewrite=self._rewrite)
    return self._session.prompt_ids

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    reply = await self.respond(self._session.act(action_ids))
    if reply.done:
      info = reply.info | {"template_deviations": float(self._deviations)}
      return StepResult(np.zeros(0, dtype=np.int32), True, reply.reward, info)
    # In a thread: a template goes through the whole conversation, which takes a while when it is long.
    continuation = await asyncio.to_thread(self._session.observe, reply.messages)
    self._deviations += not continuation.exact
    return StepResult(continuation.token_ids, False, reply.reward, reply.info, continuation.new_segment)
