"""The formats of tool calls by name: how a turn is read, how a call is written, and if a call fits its tool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sao_jax.chat.byte_chat import write_byte_call
from sao_jax.chat.tool_calls import ParsedTurn, ToolCall, has_type, parse_byte, parse_glm, parse_hermes, tool_parameters
from sao_jax.data.tokenizer import ByteTokenizer, Tokenizer
from sao_jax.errors import ConfigError

CallFormat = Literal["hermes", "glm", "byte"]
FORMATS = ("hermes", "glm", "byte")
Tools = Sequence[Mapping[str, Any]]


def check_format(chosen: str, field: str) -> str:
  """Returns the name of a format, or "" for the tokenizer's own, as it is; refuses others, by ConfigError."""
  if chosen not in ("", *FORMATS):
    raise ConfigError(
      field, f"There is no format {chosen!r} of tool calls.", f"Use one of {', '.join(FORMATS)}, or ''."
    )
  return chosen


def find_format(chosen: str, tokenizer: Tokenizer) -> CallFormat:
  """Returns the chosen format, or for "" that of a tokenizer: "byte" of the built-in one, else "hermes"."""
  return check_format(chosen, "call_format") or ("byte" if isinstance(tokenizer, ByteTokenizer) else "hermes")


def parse_turn(text: str, call_format: CallFormat, tools: Tools = ()) -> ParsedTurn:
  """Reads one turn of an assistant.

  >>> parse_turn("<|tool_call|>f {}", "byte").calls
  (ToolCall(name='f', arguments={}),)
  """
  if call_format == "hermes":
    return parse_hermes(text)
  return (parse_glm if call_format == "glm" else parse_byte)(text, tools)


def write_call(call: ToolCall, call_format: CallFormat, tools: Tools = ()) -> str:
  """Writes a call as `parse_turn` reads it, for demonstrations.

  >>> write_call(ToolCall("f", {"n": 1}), "hermes")
  '<tool_call>\\n{"name": "f", "arguments": {"n": 1}}\\n</tool_call>'
  """
  if call_format == "byte":
    return write_byte_call(call.name, call.arguments, tools)
  if call_format == "hermes":
    written = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"
  values = {
    key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    for key, value in call.arguments.items()
  }
  pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()]
  return f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>"


def find_fault(call: ToolCall, tools: Tools) -> str:
  """Compares a call with the schema of its tool; returns what is wrong with it, as a policy is told, "" if nothing is.

  >>> tools = [{"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}}}]
  >>> find_fault(ToolCall("g", {}), tools), find_fault(ToolCall("f", {"n": "one"}), tools)
  ("there is no tool 'g'; the tools are: f", "'n' of f must be of type integer")
  """
  names = [tool.get("function", tool).get("name") for tool in tools]
  if call.name not in names:
    return f"there is no tool {call.name!r:.80}; the tools are: {', '.join(names)}"
  schema = tool_parameters(call.name, tools)
  properties = schema.get("properties") or {}

  missing = [key for key in schema.get("required") or () if key not in call.arguments]
  unknown = [key for key in call.arguments if key not in properties]
  if missing or (unknown and not schema.get("additionalProperties")):
    wrong = f"needs {', '.join(map(repr, missing))}" if missing else f"takes no {unknown[0]!r:.80}"
    return f"{call.name} {wrong}; its arguments are: {', '.join(properties) or 'none'}"

  # Types as far as the schema names them.
  for key, value in call.arguments.items():
    declared = properties.get(key, {}).get("type")
    allowed = [declared] if isinstance(declared, str) else list(declared or ())
    if allowed and not any(has_type(value, name) for name in allowed):
      return f"{key!r} of {call.name} must be of type {' or '.join(allowed)}"
  return ""
