"""The chat template of the built-in tokenizer, short enough for tiny models: its special tokens, and no file.

    <|bos|><|reserved_0|>Be brief.<|end|>           system
    <|reserved_1|>python(code)<|end|>               tools, with the names of their parameters
    <|user|>12*7?<|end|>                            user
    <|assistant|><|tool_call|>python 12*7<|end|>    assistant, calls in the format of `parse_byte`
    <|observation|>84<|end|>                        the result of a tool
    <|assistant|><|answer|>84<|end|>                assistant

Texts of users and tools cannot write a special token. An assistant's turn can: those that mark a call and an answer.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.chat.template import REASONING
from sao_jax.chat.tool_calls import BYTE_CALL, END_THINK, THINK, bare_parameter
from sao_jax.errors import ConfigError

ANSWER = "<|answer|>"
END = "<|end|>"
MARKERS = {
  "system": "<|reserved_0|>",
  "developer": "<|reserved_0|>",
  "user": "<|user|>",
  "assistant": "<|assistant|>",
  "tool": "<|observation|>",
}
TOOLS = "<|reserved_1|>"
BYTE_MARKUP = frozenset({BYTE_CALL, ANSWER})  # special tokens that an assistant's text may hold


class ByteTemplate:
  """Renders conversations for `ByteTokenizer`, with the interface of `ChatTemplate`. It has no state.

  >>> from sao_jax.chat.conversation import ChatRenderer
  >>> from sao_jax.data.tokenizer import ByteTokenizer
  >>> renderer = ChatRenderer(ByteTokenizer())
  >>> session = renderer.start([{"role": "user", "content": "12*7? <|end|>"}])
  >>> len(session.prompt_ids), renderer.tokenizer.decode(session.prompt_ids)
  (17, '<|bos|><|user|>12*7? <|end|><|end|><|assistant|>')
  """

  name = "the chat template of the built-in tokenizer"

  def __init__(self, options: Mapping[str, Any] | None = None):
    """Refuses options, since it has none, by ConfigError."""
    if options:
      remedy = "Leave them out, or name a tokenizer folder."
      raise ConfigError("template_options", f"{self.name} has no options, and got {sorted(options)}.", remedy)

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool,
    now: datetime.datetime | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
  ) -> str:
    """Renders a conversation as text, see `ChatTemplate.render`; `now` is not shown.

    Raises:
      ConfigError: for a conversation without messages, unknown roles, content that is no text, and documents.
    """
    if not messages:
      raise ConfigError("messages", "A conversation has no message.", "Begin it with a system's or a user's.")
    if documents is not None:
      raise ConfigError("documents", f"{self.name} shows none.", "Write them into a message.")

    # The system's messages at the beginning come before the tools.
    parts = [self._message(message, tools or ()) for message in messages]
    is_system = [message.get("role") in ("system", "developer") for message in messages]
    first_other = [*is_system, False].index(False)
    signatures = "\n".join(_signature(tool) for tool in tools or ())
    parts.insert(first_other, f"{TOOLS}{signatures}{END}" if signatures else "")
    return "".join(["<|bos|>", *parts, MARKERS["assistant"] if add_generation_prompt else ""])

  def _message(self, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    role = message.get("role")
    if role not in MARKERS:
      raise ConfigError("messages", f"{self.name} knows no role {role!r}.", f"Use one of {', '.join(MARKERS)}.")
    said = _text(message.get("content"))
    if role == "assistant":
      thought = next((message[name] for name in REASONING if message.get(name)), None)
      said = said if thought is None else f"{THINK}{_text(thought)}{END_THINK}{said}"
      said += "".join(_call(call, tools) for call in message.get("tool_calls") or ())
    return f"{MARKERS[role]}{said}{END}"


def write_byte_call(name: str, arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
  """Writes a call as `parse_byte` reads it."""
  parameter = bare_parameter(name, tools)
  is_bare = parameter is not None and list(arguments) == [parameter] and isinstance(arguments[parameter], str)
  return f"{BYTE_CALL}{name} {arguments[parameter] if is_bare else json.dumps(arguments, ensure_ascii=False)}"


def _call(call: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
  """Writes a call of a message, whose arguments are an object or, as OpenAI's API has them, its JSON."""
  function = call.get("function", call)
  arguments = function.get("arguments") or {}
  if isinstance(arguments, str):
    try:
      arguments = json.loads(arguments)
    except ValueError:
      return f"{BYTE_CALL}{function.get('name')} {arguments}"  # as it was written
  if not isinstance(arguments, Mapping):
    return f"{BYTE_CALL}{function.get('name')} {json.dumps(arguments)}"
  return write_byte_call(str(function.get("name")), arguments, tools)


def _signature(tool: Mapping[str, Any]) -> str:
  function = tool.get("function", tool)
  parameters = (function.get("parameters") or {}).get("properties") or {}
  return f"{function.get('name')}({', '.join(parameters)})"


def _text(content: Any) -> str:
  """Returns the text of a content: a string, nothing, or blocks of text as OpenAI's API has them."""
  if content is None or isinstance(content, str):
    return content or ""
  blocks = content if isinstance(content, list) else [content]
  texts = [block.get("text") if isinstance(block, Mapping) else None for block in blocks]
  if not all(isinstance(text, str) for text in texts):
    raise ConfigError("messages", f"{ByteTemplate.name} shows texts only, not {content!r:.80}.", "Send text.")
  return "".join(texts)
