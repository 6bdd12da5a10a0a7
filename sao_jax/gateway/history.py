"""The comparison of a request with the conversation so far: agents write our turns down in their own way.

Equal are turns that say the same: blanks around the text do not count, nor the order of arguments and the ids of calls,
nor thinking that was left out, as most agents leave it. What was sampled stays in the context as it was. Anything else
that differs from what was sent and answered before is another history (rewritten, compacted, or that of another agent
beside), and begins a new segment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.gateway.exchange import Answer, ChatRequest

Normal = tuple[Any, ...]


class History:
  """The last request of an agent, and the answer to it.

  >>> history = History(ChatRequest(messages=({"role": "user", "content": "12*7?"},)))
  >>> history.answered(Answer(content="84", finish_reason="stop"))
  >>> told = [{"role": "user", "content": "12*7?"}, {"role": "assistant", "content": "84\\n"}]
  >>> history.further(ChatRequest(messages=(*told, {"role": "user", "content": "Why?"})))
  ({'role': 'user', 'content': 'Why?'},)
  >>> history.further(ChatRequest(messages=({"role": "user", "content": "Why?"},))) is None
  True
  """

  def __init__(self, request: ChatRequest):
    """Begins with a request that is not answered yet."""
    self._tools = request.tools
    self._told = [_normal(message) for message in request.messages]

  def answered(self, answer: Answer) -> None:
    """Takes the answer to the last request."""
    calls = tuple((call.name, json.loads(call.arguments)) for call in answer.tool_calls)
    self._told.append(_assistant(answer.content, calls))

  def further(self, request: ChatRequest) -> Sequence[Mapping[str, Any]] | None:
    """Returns the messages behind the last answer, at least one; None where the request does not go on from there."""
    before = len(self._told)
    if request.tools != self._tools or len(request.messages) <= before:
      return None
    if any(_normal(message) != told for message, told in zip(request.messages, self._told)):
      return None
    further = request.messages[before:]
    self._told += [_normal(message) for message in further]
    return further


def _normal(message: Mapping[str, Any]) -> Normal:
  """Reduces a message to what counts."""
  if message["role"] != "assistant":
    return message["role"], message.get("name"), message.get("content") or ""
  functions = [call["function"] for call in message.get("tool_calls") or ()]
  return _assistant(message.get("content"), tuple((function["name"], function["arguments"]) for function in functions))


def _assistant(content: str | None, calls: tuple[tuple[str, Mapping[str, Any]], ...]) -> Normal:
  return "assistant", (content or "").strip(), calls
