"""Answers as the JSON of OpenAI's API: whole, or in the chunks of a stream."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from sao_jax.gateway.exchange import Answer, Piece
from sao_jax.gateway.live_text import MARK
from sao_jax.gateway.reading import Delivery


class Sent(NamedTuple):
  """The numbers of characters of an answer that were sent already."""

  content: int = 0
  reasoning_content: int = 0

  def after(self, piece: Piece) -> Sent:
    """The numbers once a further piece was sent."""
    return Sent(self.content + len(piece.content), self.reasoning_content + len(piece.reasoning_content))


@dataclasses.dataclass(frozen=True)
class Writer:
  """Writes the answers to one request.

  With `Delivery.tokens` a choice has three fields that OpenAI's API does not have: `token_ids`, `policy_versions` (one
  for each of them) and `prompt_token_ids`. vLLM calls them so, too, where it has them.

  Attributes:
    chat: True for chat completions, False for completions of text.
    model: the name in the answer.
    delivery: the form of it.
    id, created: those of the answer; the time is in seconds.
  """

  chat: bool
  model: str
  delivery: Delivery
  id: str
  created: int

  @classmethod
  def of(cls, chat: bool, model: str, delivery: Delivery) -> Writer:
    """Makes the writer of a request that came now."""
    name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    return cls(chat, model, delivery, name, int(time.time()))

  def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
    """The body of an answer that is not streamed; `answers` has one for each choice."""
    choices = []
    for index, answer in enumerate(answers):
      said = {"message": _message(answer)} if self.chat else {"text": answer.content or ""}
      choices.append({"index": index} | said | self._ending(answer))
    name = "chat.completion" if self.chat else "text_completion"
    return self._head(name) | {"choices": choices, "usage": self.usage(answers)}

  def usage(self, answers: Sequence[Answer]) -> dict[str, int]:
    """The numbers of tokens; those of a prompt count once for all of its choices."""
    read = sum(answer.prompt_tokens for answer in answers[:: self.delivery.choices])
    sampled = sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}

  def opening(self, index: int) -> list[dict[str, Any]]:
    """The first chunk of a choice, which names the role; completions have none."""
    return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}})] if self.chat else []

  def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
    """The chunks of a further part of a choice."""
    if not self.chat:
      return [self._chunk(index, {"text": piece.content})] if piece.content else []
    parts = {"reasoning_content": piece.reasoning_content, "content": piece.content}
    return [self._chunk(index, {"delta": {name: text}}) for name, text in parts.items() if text]

  def closing(self, index: int, answer: Answer, sent: Sent) -> list[dict[str, Any]]:
    """The last chunks of a choice: what was not `sent`, tool calls, and the reason of its end."""
    content, thinking = answer.content or "", answer.reasoning_content or ""
    rest = Piece(content[sent.content :], thinking[sent.reasoning_content :])
    chunks = self.piece(index, rest)
    for number, call in enumerate(_calls(answer)):
      chunks.append(self._chunk(index, {"delta": {"tool_calls": [{"index": number} | call]}}))
    chunks.append(self._chunk(index, ({"delta": {}} if self.chat else {"text": ""}) | self._ending(answer)))
    return chunks

  def totals(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The chunk behind all choices, where the client wants one."""
    return [self._chunks_head() | {"choices": [], "usage": self.usage(answers)}] if self.delivery.usage else []

  def _head(self, name: str) -> dict[str, Any]:
    return {"id": self.id, "object": name, "created": self.created, "model": self.model}

  def _chunks_head(self) -> dict[str, Any]:
    return self._head("chat.completion.chunk" if self.chat else "text_completion")

  def _chunk(self, index: int, content: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": index, "logprobs": None, "finish_reason": None} | content
    return self._chunks_head() | {"choices": [choice]} | ({"usage": None} if self.delivery.usage else {})

  def _ending(self, answer: Answer) -> dict[str, Any]:
    """The reason of a choice's end, and the facts of its tokens."""
    ending: dict[str, Any] = {"logprobs": None, "finish_reason": answer.finish_reason}
    if self.delivery.logprobs:
      ending["logprobs"] = _chat_logprobs(answer) if self.chat else _completion_logprobs(answer)
    if self.delivery.tokens:
      ending |= {
        "prompt_token_ids": [int(token) for token in answer.prompt_token_ids],
        "token_ids": [int(token) for token in answer.token_ids],
        "policy_versions": [int(version) for version in answer.policy_versions],
      }
    return ending


def _message(answer: Answer) -> dict[str, Any]:
  message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
  if answer.reasoning_content is not None:
    message["reasoning_content"] = answer.reasoning_content
  if answer.tool_calls:
    message["tool_calls"] = _calls(answer)
  return message


def _calls(answer: Answer) -> list[dict[str, Any]]:
  return [
    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    for call in answer.tool_calls
  ]


def _chat_logprobs(answer: Answer) -> dict[str, Any]:
  content = [
    {"token": text, "logprob": float(logprob), "bytes": _bytes(text), "top_logprobs": []}
    for text, logprob in zip(answer.token_texts, answer.logprobs, strict=True)
  ]
  return {"content": content, "refusal": None}


def _completion_logprobs(answer: Answer) -> dict[str, Any]:
  offsets, place = [], 0
  for text in answer.token_texts:
    offsets.append(place)
    place += len(text)
  logprobs = [float(logprob) for logprob in answer.logprobs]
  tokens = list(answer.token_texts)
  return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def _bytes(text: str) -> list[int] | None:
  """The bytes of a token; None where it is only a part of a character, which its text does not show."""
  return None if MARK in text else list(text.encode("utf-8"))
