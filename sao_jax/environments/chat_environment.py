"""Environments that speak text: messages in, messages out; the chat template makes token ids of them.

Sampled tokens are kept id by id (`sao_jax.chat.conversation`). A subclass opens an episode with messages and answers
the assistant's turns; `sao_jax.chat.tool_calls` reads the tool calls in them.
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
  """A chat environment's answer to one turn.

  Attributes:
    messages: messages to append (tool results, a user's message); at least one unless done.
    done: True when the episode has ended.
    reward: as in `StepResult`: required when done, possible with any turn.
    info: small facts for logs, name -> number.
  """

  messages: Sequence[Message] = ()
  done: bool = False
  reward: float | None = None
  info: dict[str, float] = dataclasses.field(default_factory=dict)


class ChatEnvironment(Environment):
  """One conversation as an episode. Subclasses implement `open` and `respond`.

  When the template rewrites history (drops earlier thinking, say), the answer begins a new context: `StepResult` says
  what that means. With `rewrite="keep"` the context is extended instead, and the policy goes on seeing what it wrote.

  >>> class Greeting(ChatEnvironment):
  ...   async def open(self, prompt):
  ...     return [{"role": "user", "content": f"Greet {prompt.data['name']}."}]
  ...
  ...   async def respond(self, said):
  ...     return Reply(done=True, reward=float("Hello" in said))
  >>> from sao_jax.chat.hf_tokenizer import HFTokenizer
  >>> from sao_jax.episode import PromptKey
  >>> renderer = ChatRenderer(HFTokenizer(folder))  # a folder with tokenizer.json and a chat template
  >>> environment = Greeting("greeting", renderer)
  >>> prompt_ids = asyncio.run(environment.reset(Prompt(PromptKey("greeting", 0, 0), {"name": "Ada"})))
  >>> print(renderer.tokenizer.decode(prompt_ids), end="")
  <|im_start|>user
  Greet Ada.<|im_end|>
  <|im_start|>assistant
  >>> action_ids = renderer.tokenizer.encode_with_specials("Hello Ada!<|im_end|>")  # sampled, in a real run
  >>> asyncio.run(environment.step(action_ids)).reward
  1.0

  Attributes:
    tools: JSON schemas for the template, set before `open` returns.
  """

  tools: Tools = None

  def __init__(self, name: str, renderer: ChatRenderer, *, rewrite: str = "segment"):
    """Names the environment; `renderer` and `rewrite` are those of its `ChatSession`s."""
    self.name, self.stop_ids = name, renderer.stop_ids
    self._renderer, self._rewrite = renderer, rewrite
    self._session: ChatSession | None = None
    self._deviations = 0  # turns after which the context differed from the template's rendering of the conversation

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

    # In a thread, because a template goes through the whole conversation, which takes a while when it is long.
    continuation = await asyncio.to_thread(self._session.observe, reply.messages)
    self._deviations += not continuation.exact
    return StepResult(continuation.token_ids, False, reply.reward, reply.info, continuation.new_segment)
