"""Tool calls in the text of an assistant: pure functions from text to calls, one for each format.

Qwen and Hermes:  <tool_call>
                  {"name": "search", "arguments": {"query": "jax"}}
                  </tool_call>
GLM:              <tool_call>search
                  <arg_key>query</arg_key>
                  <arg_value>jax</arg_value>
                  </tool_call>
Built-in tokens:  <|tool_call|>search jax
                  <|tool_call|>book {"seats": 2, "row": "F"}

The last is for the tiny models of the byte tokenizer: a call ends with the turn, or where the next one begins, and the
argument of a tool that takes one string stands bare.

No text raises: a call that cannot be read becomes a `ParseError`, whose `observation` tells the policy so. Calls inside
thinking do not count.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
BYTE_CALL = "<|tool_call|>"  # a token of `ByteTokenizer`
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
SHOWN = 200  # characters of a broken call that its observation repeats


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A call that could be read. Arguments are JSON values; nobody has checked yet if such a tool exists."""

  name: str
  arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ParseError:
  """A call that could not be read: the problem with it, in one clause, and its text."""

  problem: str
  text: str

  @property
  def observation(self) -> str:
    """The text with which to answer the policy."""
    shown = self.text if len(self.text) <= SHOWN else f"{self.text[:SHOWN]}..."
    return f"Error: this tool call could not be read, {self.problem}: {shown}"


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
  """The parts of one turn of an assistant.

  Attributes:
    thinking: the text between think tags.
    items: the rest in order: text as it stands (blank text left out), calls, and calls that could not be read.
  """

  thinking: str
  items: tuple[str | ToolCall | ParseError, ...]

  @property
  def text(self) -> str:
    """All text outside thinking and calls."""
    return "".join(item for item in self.items if isinstance(item, str))

  @property
  def calls(self) -> tuple[ToolCall | ParseError, ...]:
    """All calls in order, readable or not, since each of them wants an answer."""
    return tuple(item for item in self.items if not isinstance(item, str))


def parse_hermes(text: str) -> ParsedTurn:
  """Reads calls in the format of Qwen and Hermes: one JSON object with `name` and `arguments` each."""
  return _parse(text, _read_hermes)


def parse_glm(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
  """Reads calls in GLM's format: a name, then keys and values.

  The format writes strings bare and other values as JSON. A value is a string where the tool's schema says so, and is
  read as JSON otherwise. Without a schema, a value that is no JSON is a string too.

  Args:
    text: the assistant's turn.
    tools: JSON schemas of the tools, as given to the chat template.
  """
  return _parse(text, lambda text, start: _read_glm(text, start, tools))


def parse_byte(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
  """Reads calls in the format of the built-in tokenizer: a name, a blank, and an argument or a JSON object of them.

  Args:
    text: the assistant's turn.
    tools: JSON schemas of the tools; without its schema a tool takes a JSON object.
  """
  return _parse(text, lambda text, start: _read_byte(text, start, tools), BYTE_CALL, BYTE_CALL)


def bare_parameter(name: str, tools: Sequence[Mapping[str, Any]]) -> str | None:
  """Finds the one parameter of a tool that takes nothing but a string; None for other tools, and for unknown ones."""
  properties = tool_parameters(name, tools).get("properties") or {}
  if len(properties) != 1:
    return None
  ((parameter, described),) = properties.items()
  return parameter if isinstance(described, Mapping) and described.get("type") == "string" else None


class _Broken(Exception):
  """The problem with a call that cannot be read."""


def _parse(
  text: str, read: Callable[[str, int], tuple[ToolCall, int]], call_mark: str = CALL, end_mark: str = END_CALL
) -> ParsedTurn:
  """Splits a turn into thinking, text and calls.

  Args:
    text: the assistant's turn.
    read: reads one call: (text, place behind its first mark) -> (call, place behind its last mark); raises _Broken.
    call_mark: begins a call.
    end_mark: ends a call; where it is the mark that begins one, that is left for the next call.
  """
  closing = "" if end_mark == call_mark else end_mark
  thinking: list[str] = []
  items: list[str | ToolCall | ParseError] = []
  place, think, call = 0, -1, -1
  while place < len(text):
    # Text up to the next mark. A mark is looked for only once the last one found has been passed.
    think = think if think >= place else _find(text, THINK, place)
    call = call if call >= place else _find(text, call_mark, place)
    mark = min(think, call)
    if text[place:mark].strip():
      items.append(text[place:mark])
    if mark == len(text):
      break

    if think < call:
      end = _find(text, END_THINK, think)  # unclosed thinking goes on to the end
      thinking.append(text[think + len(THINK) : end])
      place = end + len(END_THINK)
      continue

    # Behind a broken call, go on at its end or at the next call, whichever comes first.
    try:
      item, place = read(text, call + len(call_mark))
    except _Broken as broken:
      behind = call + len(call_mark)
      place = min(_find(text, end_mark, behind) + len(closing), _find(text, call_mark, behind))
      item = ParseError(str(broken), text[call:place])
    items.append(item)
  return ParsedTurn("\n".join(thinking), tuple(items))


def _read_hermes(text: str, start: int) -> tuple[ToolCall, int]:
  # The messages are shown to the policy, so that it can correct itself.
  start = _skip_blanks(text, start)
  try:
    value, end = _decode(text, start)
  except json.JSONDecodeError as error:
    raise _Broken(f"it holds no valid JSON ({error.msg} at character {error.pos - start})") from error
  except ValueError as error:
    raise _Broken(f"it holds no valid JSON ({error})") from error
  end = _expect(text, end, END_CALL, "behind the JSON object")

  # The object is a call: these two keys, of these types.
  if not isinstance(value, dict):
    raise _Broken("it must be a JSON object")
  if sorted(value) != ["arguments", "name"]:
    raise _Broken(f"it must have the keys name and arguments, not {', '.join(map(repr, value)) or 'none'}")
  if not isinstance(value["name"], str) or not value["name"].strip():
    raise _Broken("name must be a string that is not empty")
  if not isinstance(value["arguments"], dict):
    raise _Broken("arguments must be a JSON object")
  return ToolCall(value["name"], value["arguments"]), end


def _read_glm(text: str, start: int, tools: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, int]:
  place = min(_find(text, tag, start) for tag in (KEY, END_CALL, CALL))
  name = text[start:place].strip()
  if not name or "\n" in name or "<" in name:
    raise _Broken("the name of the tool must stand on one line behind <tool_call>")
  schema = tool_parameters(name, tools).get("properties") or {}
  arguments: dict[str, Any] = {}
  while text.startswith(KEY, place):
    key, place = _between(text, place, KEY, END_KEY)
    value, place = _between(text, _skip_blanks(text, place), VALUE, END_VALUE)
    if key in arguments:
      raise _Broken(f"it gives {key!r} twice")
    arguments[key] = _glm_value(key, value, schema)
    place = _skip_blanks(text, place)
  return ToolCall(name, arguments), _expect(text, place, END_CALL, "behind the arguments")


def _read_byte(text: str, start: int, tools: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, int]:
  end = _find(text, BYTE_CALL, start)
  name, blank, rest = re.fullmatch(r"([\w.-]*)(\s?)(.*)", text[start:end], re.DOTALL).groups()
  if not name or (rest and not blank):
    raise _Broken(f"the name of the tool must stand behind {BYTE_CALL}, and a blank behind the name")
  parameter = bare_parameter(name, tools)
  if parameter is not None:
    return ToolCall(name, {parameter: rest}), end

  # Other tools take an object; none is an empty one.
  try:
    arguments, behind = _decode(rest.strip() or "{}", 0)
    whole = behind == len(rest.strip() or "{}")
  except ValueError as error:
    raise _Broken(f"its arguments are no valid JSON ({error})") from error
  if not whole or not isinstance(arguments, dict):
    raise _Broken("its arguments must be one JSON object")
  return ToolCall(name, arguments), end


def _glm_value(key: str, value: str, schema: Mapping[str, Any]) -> Any:
  """Reads the value of argument `key` with the types that the schema allows."""
  described = schema.get(key)
  declared = described.get("type") if isinstance(described, Mapping) else None
  allowed = (declared,) if isinstance(declared, str) else tuple(declared or ())
  if allowed == ("string",):
    return value

  # JSON of an allowed type is decoded; other text is a string, where that is allowed.
  try:
    decoded, end = _decode(value, _skip_blanks(value, 0))
    is_json = _skip_blanks(value, end) == len(value)
  except ValueError:
    is_json = False

  if is_json and (not allowed or any(has_type(decoded, name) for name in allowed)):
    return decoded
  if not allowed or "string" in allowed:
    return value
  raise _Broken(f"the value of {key!r} must be JSON of type {' or '.join(allowed)}")


def has_type(value: Any, name: str) -> bool:
  """Tells if a JSON value is of the type that a JSON schema calls `name`."""
  if isinstance(value, bool):
    return name == "boolean"
  types = {"integer": int, "number": int | float, "object": dict, "array": list, "null": type(None), "string": str}
  return name in types and isinstance(value, types[name])


def tool_parameters(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
  """Finds the JSON schema of a tool's arguments, {} where there is none."""
  for tool in tools:
    function = tool.get("function", tool)
    if function.get("name") == name:
      return function.get("parameters") or {}
  return {}


def _decode(text: str, start: int) -> tuple[Any, int]:
  """Reads the JSON at `start`; returns (value, place behind it). Raises ValueError if it is not strict JSON."""
  try:
    value, end = DECODER.raw_decode(text, start)
    json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails on half a surrogate pair, which no tokenizer takes
  except UnicodeEncodeError as error:
    raise ValueError("half a surrogate pair") from error
  except RecursionError as error:
    raise ValueError("it is nested too deeply") from error
  return value, end


def _refuse_constant(name: str) -> NoReturn:
  raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
  value = float(text)
  if math.isinf(value):
    raise ValueError(f"{text if len(text) <= 40 else text[:40] + '...'} is larger than any float")
  return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  value = dict(pairs)
  if len(value) < len(pairs):
    raise ValueError("an object has a key twice")
  return value


DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)


def _between(text: str, place: int, opening: str, closing: str) -> tuple[str, int]:
  """Returns (text between the tags, place behind them)."""
  start = _expect(text, place, opening, "between a key and its value")
  end = text.find(closing, start)
  if end < 0:
    raise _Broken(f"{closing} is missing")
  return text[start:end], end + len(closing)


def _expect(text: str, place: int, tag: str, where: str) -> int:
  """Skips blanks and the tag; returns the place behind it."""
  place = _skip_blanks(text, place)
  if not text.startswith(tag, place):
    raise _Broken(f"{tag} is missing {where}")
  return place + len(tag)


def _skip_blanks(text: str, place: int) -> int:
  while place < len(text) and text[place].isspace():
    place += 1
  return place


def _find(text: str, tag: str, start: int) -> int:
  """Returns the place where the tag begins, or the end of the text without one."""
  place = text.find(tag, start)
  return len(text) if place < 0 else place
