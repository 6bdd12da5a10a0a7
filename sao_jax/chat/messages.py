"""Questions that are conversations: lists of messages in OpenAI's form, as many data sets for RL have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sao_jax.chat.template import Message

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(value: Any) -> list[Message]:
  """Returns a conversation that an assistant is to go on with.

  Contents are texts, or lists of parts {"type": "text", "text": ...}, which are joined. Other keys of a message stay,
  as templates may read them; those without a value are left out.

  Raises:
    ValueError: it is none: no list of messages with a role and a text, or the assistant has spoken last.

  >>> read_messages([{"role": "user", "content": [{"type": "text", "text": "3+4"}], "name": None}])
  [{'role': 'user', 'content': '3+4'}]
  """
  if not isinstance(value, list | tuple) or not value:
    raise ValueError("it is no list of messages")
  messages = [_message(each) for each in value]
  if messages[-1]["role"] not in ("user", "tool"):
    raise ValueError(f"its last message is the {messages[-1]['role']}'s, to which nothing is to be said")
  return messages


def with_instruction(messages: list[Message], instruction: str) -> list[Message]:
  """Adds an instruction as the system's message, or behind what the system says already."""
  if not instruction:
    return messages
  if messages[0]["role"] in ("system", "developer"):
    first = {**messages[0], "content": f"{messages[0]['content']}\n\n{instruction}"}
    return [first, *messages[1:]]
  return [{"role": "system", "content": instruction}, *messages]


def text_of(question: str | list[Message]) -> str:
  """Writes a text or a conversation as one text: all that was said, with the roles where there are several messages."""
  if isinstance(question, str):
    return question
  messages = read_messages(question)
  if len(messages) == 1:
    return messages[0]["content"]
  return "\n\n".join(f"{message['role']}: {message.get('content', '')}" for message in messages)


def _message(value: Any) -> Message:
  if not isinstance(value, Mapping) or value.get("role") not in ROLES:
    raise ValueError(f"{value!r:.80} is no message of one of {', '.join(ROLES)}")
  content = value.get("content")
  if isinstance(content, list | tuple):
    content = "".join(_text_of_part(part) for part in content)
  calls = value["role"] == "assistant" and value.get("tool_calls")
  silent = bool(calls) and content in (None, "")
  if not silent and not (isinstance(content, str) and content.strip()):
    raise ValueError(f"the {value['role']}'s message has the content {content!r:.80}, which is no text")
  return {key: each for key, each in {**value, "content": content}.items() if each is not None}


def _text_of_part(part: Any) -> str:
  if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
    raise ValueError(f"a message has the part {part!r:.80}, which is no text")
  return part["text"]
