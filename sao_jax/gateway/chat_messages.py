"""Messages and tools of a chat request, in the form that chat templates read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sao_jax.gateway.request_fields import check_known, flag_of, list_of, object_of, refuse, text_of, unsupported
from sao_jax.json_values import unstorable

# The keys of each role's messages. What was answered before comes back in an assistant's.
KEYS = {
  "system": {"role", "content", "name"},
  "developer": {"role", "content", "name"},
  "user": {"role", "content", "name"},
  "assistant": {"role", "content", "name", "tool_calls", "reasoning_content", "reasoning"},
  "tool": {"role", "content", "name", "tool_call_id"},
}
PLAIN, TALKERS = {"role", "content"}, ("system", "user", "assistant")
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def read_messages(value: Any) -> tuple[dict[str, Any], ...]:
  """Reads the messages of a conversation.

  Parts of text are joined, "developer" becomes "system", arguments of tool calls become objects.

  Raises:
    RequestRefused: naming the first field that cannot be read, as `messages[3].content[1].type`.
  """
  messages = list_of(value, "messages")
  if not messages:
    raise refuse("messages", "there must be at least one.", "empty_array")

  # One by one, with the ids of all calls so far.
  called: set[str] = set()
  read = []
  for index, given in enumerate(messages):
    # Most are plain, and conversations grow long.
    if isinstance(given, dict) and given.keys() == PLAIN and given["role"] in TALKERS and type(given["content"]) is str:
      read.append(dict(given))
      continue
    message = _read_message(object_of(given, f"messages[{index}]"), f"messages[{index}]")

    # A result belongs to a call that was made before.
    if message["role"] == "tool" and message["tool_call_id"] not in called:
      raise refuse(f"messages[{index}].tool_call_id", "no tool call before this message has that id.")
    called.update(call["id"] for call in message.get("tool_calls", ()))
    read.append(message)
  return tuple(read)


def _read_message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
  role = text_of(given, "role", f"{where}.")
  if role not in KEYS:
    raise refuse(f"{where}.role", f"it must be one of {', '.join(KEYS)}.")
  check_known(given, KEYS[role], f"{where}.")
  message: dict[str, Any] = {"role": "system" if role == "developer" else role}

  # The content: only an assistant's may be missing, beside calls.
  calls = given.get("tool_calls") or []
  if given.get("content") is None and not (role == "assistant" and calls):
    raise refuse(f"{where}.content", "it is missing.", "missing_required_parameter")
  message["content"] = _read_content(given.get("content"), f"{where}.content")
  if (name := text_of(given, "name", f"{where}.")) is not None:
    message["name"] = name

  # What only some roles have.
  if role == "tool":
    message["tool_call_id"] = text_of(given, "tool_call_id", f"{where}.")
    if message["tool_call_id"] is None:
      raise refuse(f"{where}.tool_call_id", "it is missing.", "missing_required_parameter")
  for key in ("reasoning_content", "reasoning"):
    if role == "assistant" and (thinking := text_of(given, key, f"{where}.")):
      message.setdefault("reasoning_content", thinking)
  if calls:
    calls = list_of(calls, f"{where}.tool_calls")
    message["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
  return message


def _read_content(content: Any, where: str) -> str:
  """Reads a text, or parts that are all text; a missing content is empty."""
  if content is None or isinstance(content, str):
    return content or ""
  if not isinstance(content, list):
    raise refuse(where, "it must be a string or a list of parts.", "invalid_type")

  # Parts, each of which must be text.
  texts = []
  for index, part in enumerate(content):
    place = f"{where}[{index}]"
    kind = text_of(object_of(part, place), "type", f"{place}.")
    if kind != "text":
      raise unsupported(f"{place}.type", f"this server takes parts of text only, not {kind!r}.")
    check_known(part, ("type", "text"), f"{place}.")
    text = text_of(part, "text", f"{place}.")
    if text is None:
      raise refuse(f"{place}.text", "it is missing.", "missing_required_parameter")
    texts.append(text)

  return "".join(texts)


def _read_call(value: Any, where: str) -> dict[str, Any]:
  """Reads a tool call that an assistant has made."""
  # The call, and the function in it.
  call = object_of(value, where)
  check_known(call, ("id", "type", "function", "index"), f"{where}.")
  function = object_of(call.get("function"), f"{where}.function")
  check_known(function, ("name", "arguments"), f"{where}.function.")
  if (call.get("type") or "function") != "function":
    raise unsupported(f"{where}.type", "this server knows calls of functions only.")
  call_id, name = text_of(call, "id", f"{where}."), text_of(function, "name", f"{where}.function.")
  if not call_id or not name:
    raise refuse(f"{where}.{'function.name' if call_id else 'id'}", "it is missing.", "missing_required_parameter")

  # Arguments come as JSON in a string, and templates want what it says.
  place = f"{where}.function.arguments"
  try:
    arguments = json.loads(text_of(function, "arguments", f"{where}.function.") or "{}")
  except (ValueError, RecursionError) as error:
    raise refuse(place, "it must be JSON in a string.") from error
  problem = unstorable(object_of(arguments, place), "arguments")
  if problem is not None:
    raise refuse(place, f"{problem}.")
  return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_tools(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
  """Reads `tools` and `tool_choice`: the tools to show to the policy, None without any.

  `strict` is left out: arguments are parsed, and not constrained while they are sampled.

  Raises:
    RequestRefused: naming the field.
  """
  tools = None
  if body.get("tools") not in (None, []):
    tools = tuple(_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(list_of(body["tools"], "tools")))
  choice = body.get("tool_choice")
  if isinstance(choice, dict):
    name = text_of(object_of(choice.get("function"), "tool_choice.function"), "name", "tool_choice.function.")
    if name not in [tool["function"]["name"] for tool in tools or ()]:
      raise refuse("tool_choice.function.name", "no tool has that name.")
  elif choice not in (None, "none", "auto", "required"):
    raise refuse("tool_choice", 'it must be "none", "auto", "required", or a function of the tools.')
  if choice in ("auto", "required") and tools is None:
    raise refuse("tool_choice", "it is only allowed together with tools.")
  return None if choice == "none" else tools


def _read_tool(value: Any, where: str) -> dict[str, Any]:
  tool = object_of(value, where)
  check_known(tool, ("type", "function"), f"{where}.")
  if tool.get("type") != "function":
    raise unsupported(f"{where}.type", 'this server knows tools of type "function" only.')
  function = object_of(tool.get("function"), f"{where}.function")
  check_known(function, ("name", "description", "parameters", "strict"), f"{where}.function.")

  # The parts of its description.
  name = text_of(function, "name", f"{where}.function.")
  if name is None or not TOOL_NAME.fullmatch(name):
    raise refuse(f"{where}.function.name", "it must be up to 64 letters, digits, underscores and dashes.")
  text_of(function, "description", f"{where}.function.")
  flag_of(function, "strict", f"{where}.function.")
  _check_schema(function.get("parameters"), f"{where}.function.parameters")
  kept = {key: item for key, item in function.items() if key != "strict" and item is not None}
  return {"type": "function", "function": kept}


def _check_schema(parameters: Any, where: str) -> None:
  """Checks the parts of a JSON schema that the parsers of tool calls look at."""
  if parameters is None:
    return
  properties = object_of(parameters, where).get("properties")
  for name, schema in object_of(properties or {}, f"{where}.properties").items():
    kind = schema.get("type") if isinstance(schema, dict) else None
    if not (kind is None or isinstance(kind, str) or (isinstance(kind, list) and all(map(_is_text, kind)))):
      raise refuse(f"{where}.properties.{name}.type", "it must be a string or a list of strings.", "invalid_type")


def _is_text(value: Any) -> bool:
  return isinstance(value, str)
