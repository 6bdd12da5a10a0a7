"""Reasoning-gym tasks as a chat of one turn, with the tokenizer and chat template of a Hugging Face folder.

What stands between the last answer tags behind the thinking is the answer; without them there is none, which earns 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sao_jax.data.chat import ChatRenderer
from sao_jax.data.chat_template import Message
from sao_jax.environments.base import Demonstration, Prompt
from sao_jax.environments.chat import ChatEnvironment, Reply

if TYPE_CHECKING:
  from sao_jax.environments.reasoning_gym import ReasoningGym

INSTRUCTION = "Write your final answer between <answer> and </answer>, and nothing else between them."


class ReasoningGymChatEpisode(ChatEnvironment):
  """One question, one answer."""

  def __init__(self, settings: ReasoningGym, renderer: ChatRenderer):
    super().__init__(settings.name, renderer)
    self._settings = settings

  async def open(self, prompt: Prompt) -> Sequence[Message]:
    self._seed = prompt.data["seed"]
    self._entry = await asyncio.to_thread(self._settings.entry, prompt)
    return chat_messages(self._entry["question"])

  async def respond(self, said: str) -> Reply:
    answer = read_answer(said)
    reward = 0.0
    if answer is not None:
      reward = await self._settings.graders.grade(self.name, self._seed, self._entry, answer)
    return Reply(done=True, reward=reward, info={"answered": float(answer is not None)})


def chat_messages(question: str) -> list[Message]:
  """The conversation before the answer."""
  return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]


def read_answer(said: str) -> str | None:
  """Text between the last <answer> and the </answer> behind it, thinking left out; None without both."""
  _, closed, shown = said.rpartition("</think>")
  start = shown.rfind("<answer>")
  if start < 0 or (not closed and "<think>" in said):
    return None
  answer, end, _ = shown[start + len("<answer>") :].partition("</answer>")
  return answer.strip() if end else None


def chat_demonstration(renderer: ChatRenderer, question: str, answer: str, reward: float) -> Demonstration:
  """The episode in which the assistant gives the answer at once."""
  session = renderer.start(chat_messages(question))
  session.act(session.action_ids(f"<answer>{answer}</answer>"))
  (segment,) = session.segments
  return Demonstration(segment.token_ids, segment.action_mask, reward)
