"""Tool calls of the Qwen (Hermes) and GLM formats, from what policies write to typed calls and errors."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.chat.tool_calls import ParseError, ToolCall, parse_glm, parse_hermes


def hermes(*objects: str) -> str:
  return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


def glm(name: str, **arguments: str) -> str:
  pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
  return f"<tool_call>{name}\n{pairs}</tool_call>"


@pytest.mark.parametrize(
  "text, thinking, items",
  [
    ("", "", []),
    ("just text", "", ["just text"]),
    (hermes('{"name": "f", "arguments": {"a": 1}}'), "", [ToolCall("f", {"a": 1})]),
    ('<tool_call>{"name":"f","arguments":{}}</tool_call>', "", [ToolCall("f", {})]),  # no line breaks
    (
      "before " + hermes('{"name": "f", "arguments": {}}') + " after",
      "",
      ["before ", ToolCall("f", {}), " after"],
    ),
    (
      hermes('{"name": "f", "arguments": {"a": {"b": [1, {"c": null}], "d": "}"}}}'),  # nested, a brace in a string
      "",
      [ToolCall("f", {"a": {"b": [1, {"c": None}], "d": "}"}})],
    ),
    (
      hermes('{"arguments": {"a": "é"}, "name": "f"}', '{"name": "g", "arguments": {"a": true}}'),
      "",
      [ToolCall("f", {"a": "é"}), ToolCall("g", {"a": True})],
    ),
    (
      hermes('{"name": "f", "arguments": {"text": "</tool_call> <think>"}}') + "x",  # tags inside a string are text
      "",
      [ToolCall("f", {"text": "</tool_call> <think>"}), "x"],
    ),
    (
      "<think>\nmaybe "
      + hermes('{"name": "no", "arguments": {}}')
      + "</think>\n\nso"
      + hermes('{"name":"f","arguments":{}}'),
      "\nmaybe " + hermes('{"name": "no", "arguments": {}}'),
      ["\n\nso", ToolCall("f", {})],
    ),
    ("<think>cut " + hermes('{"name": "no", "arguments": {}}'), "cut " + hermes('{"name": "no", "arguments": {}}'), []),
    ("<think>a</think>x<think>b</think>y", "a\nb", ["x", "y"]),
  ],
)
def test_hermes(text, thinking, items):
  turn = parse_hermes(text)
  assert (turn.thinking, list(turn.items)) == (thinking, items)
  assert turn.text == "".join(item for item in items if isinstance(item, str))
  assert list(turn.calls) == [item for item in items if isinstance(item, ToolCall)]


@pytest.mark.parametrize(
  "body, problem",
  [
    ('{"name": "f", "arguments": {"a": 1}', "no valid JSON (Expecting ',' delimiter at character"),
    ("{'name': 'f'}", "no valid JSON (Expecting property name"),
    ("", "no valid JSON (Expecting value at character 0)"),
    ("search(query)", "no valid JSON"),
    ('{"name": "f", "arguments": {}} {"name": "g", "arguments": {}}', "</tool_call> is missing behind the JSON"),
    ('["f", {}]', "must be a JSON object"),
    ("3", "must be a JSON object"),
    ('{"name": "f"}', "must have the keys name and arguments, not 'name'"),
    ("{}", "not none"),
    ('{"name": "f", "parameters": {}}', "not 'name', 'parameters'"),
    ('{"name": "f", "arguments": {}, "id": 1}', "must have the keys"),
    ('{"name": 3, "arguments": {}}', "name must be a string"),
    ('{"name": " ", "arguments": {}}', "name must be a string"),
    ('{"name": "f", "arguments": "{}"}', "arguments must be a JSON object"),
    ('{"name": "f", "arguments": null}', "arguments must be a JSON object"),
    ('{"name": "f", "arguments": {"a": NaN}}', "NaN is no JSON number"),
    ('{"name": "f", "arguments": {"a": -Infinity}}', "-Infinity is no JSON number"),
    ('{"name": "f", "arguments": {"a": Infinity}}', "Infinity is no JSON number"),
    ('{"name": "f", "arguments": {"a": 1e999}}', "1e999 is larger than any float"),
    ('{"name": "f", "arguments": {"a": [{"b": -1.5E+400}]}}', "-1.5E+400 is larger than any float"),
    ('{"name": "f", "arguments": {"a": ' + "9" * 500 + ".0}}", "9... is larger than any float"),
    ('{"name": "f", "arguments": {"a": 01}}', "no valid JSON"),
    ('{"name": "f", "arguments": {"a": .5}}', "no valid JSON"),
    ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "a key twice"),
    ('{"name": "f", "arguments": {"a": [{"b": 1, "\\u0062": 2}]}}', "a key twice"),
    ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "no valid JSON (Exceeds the limit"),
    ('{"name": "f", "arguments": {"a": ' + "[" * 100_000, "nested too deeply"),
    (r'{"name": "f", "arguments": {"a": "\ud83d"}}', "half a surrogate pair"),
    (r'{"name": "f", "arguments": {"a\udc00": 1}}', "half a surrogate pair"),
    (r'{"name": "f\ud83d", "arguments": {}}', "half a surrogate pair"),
  ],
)
def test_a_broken_hermes_call_becomes_an_observation_that_says_so(body, problem):
  good = '{"name": "g", "arguments": {}}'
  turn = parse_hermes("a" + hermes(body) + "b" + hermes(good))
  before, broken, after, call = turn.items
  assert (before, after, call) == ("a", "b", ToolCall("g", {}))
  assert isinstance(broken, ParseError) and problem in broken.problem and broken.text == hermes(body)
  assert problem in broken.observation and "could not be read" in broken.observation and len(broken.observation) < 500
  assert turn.calls == (broken, call)


def test_an_unclosed_call_is_broken_and_takes_no_other_call_with_it():
  good = hermes('{"name": "g", "arguments": {}}')
  for unclosed in ('<tool_call>{"name": "f", "arguments": {}}', '<tool_call>{"name'):
    first, second = parse_hermes(unclosed + good).items
    assert isinstance(first, ParseError) and first.text == unclosed and second == ToolCall("g", {})
    (alone,) = parse_hermes(unclosed).items
    assert isinstance(alone, ParseError) and alone.text == unclosed


SCHEMA = [
  {
    "type": "function",
    "function": {
      "name": "f",
      "parameters": {
        "properties": {
          "s": {"type": "string"},
          "i": {"type": "integer"},
          "n": {"type": "number"},
          "o": {"type": "object"},
          "m": {"type": ["string", "null"]},
          "u": {},
        }
      },
    },
  },
  {"name": "flat", "parameters": {"properties": {"s": {"type": "string"}}}},
  {"name": "bare"},
]


@pytest.mark.parametrize(
  "text, items",
  [
    (glm("f", s="5"), [ToolCall("f", {"s": "5"})]),
    (glm("f", i="5", o='{"a": [1, {"b": null}]}'), [ToolCall("f", {"i": 5, "o": {"a": [1, {"b": None}]}})]),
    (glm("f", m="null"), [ToolCall("f", {"m": None})]),
    (glm("f", m="5"), [ToolCall("f", {"m": "5"})]),
    (glm("f", u="5", other="x y"), [ToolCall("f", {"u": 5, "other": "x y"})]),
    (glm("flat", s="[1]"), [ToolCall("flat", {"s": "[1]"})]),
    (glm("bare", a="1e999", b="7e1000"), [ToolCall("bare", {"a": "1e999", "b": "7e1000"})]),  # a hash is no number
    (glm("f", n="1e308", i=str(10**400)), [ToolCall("f", {"n": 1e308, "i": 10**400})]),  # integers have no bound
    (glm("bare", a=" 7 ", b='"q"', c="NaN"), [ToolCall("bare", {"a": 7, "b": "q", "c": "NaN"})]),
    (glm("unknown"), [ToolCall("unknown", {})]),
    ("<tool_call>unknown</tool_call>", [ToolCall("unknown", {})]),
    (
      "<tool_call>f<arg_key>s</arg_key><arg_value>a\nb</arg_value></tool_call>",
      [ToolCall("f", {"s": "a\nb"})],
    ),
    (glm("f", s="</tool_call><tool_call>g"), [ToolCall("f", {"s": "</tool_call><tool_call>g"})]),
    (f"a{glm('f')}\n{glm('g')}b", ["a", ToolCall("f", {}), ToolCall("g", {}), "b"]),
    (f"\n<think>{glm('no')}</think>\n{glm('f')}", [ToolCall("f", {})]),
  ],
)
def test_glm(text, items):
  assert list(parse_glm(text, SCHEMA).items) == items


@pytest.mark.parametrize(
  "call, problem",
  [
    ("<tool_call></tool_call>", "the name of the tool"),
    ("<tool_call>two\nlines</tool_call>", "the name of the tool"),
    ('<tool_call>{"name": "f", "arguments": {"a": "<"}}</tool_call>', "the name of the tool"),
    ("<tool_call>f\n<arg_key>s</arg_value></tool_call>", "</arg_key> is missing"),
    ("<tool_call>f\n<arg_key>s</arg_key></tool_call>", "<arg_value> is missing between a key and its value"),
    ("<tool_call>f\n<arg_key>s</arg_key><arg_value>1</tool_call>", "</arg_value> is missing"),
    ("<tool_call>f\n<arg_key>s</arg_key><arg_value>1</arg_value>x</tool_call>", "</tool_call> is missing behind"),
    (glm("f", i="five"), "the value of 'i' must be JSON of type integer"),
    (glm("f", i="true"), "the value of 'i' must be JSON of type integer"),
    (glm("f", n="1e999"), "the value of 'n' must be JSON of type number"),
    (glm("f", n="-Infinity"), "the value of 'n' must be JSON of type number"),
    (glm("f", o='{"a": 1e999}'), "the value of 'o' must be JSON of type object"),
    (glm("f", o='{"a": 1, "a": 2}'), "the value of 'o' must be JSON of type object"),
    (glm("f", i="1").replace("</tool_call>", glm("f", i="2")[len("<tool_call>f\n") :]), "gives 'i' twice"),
  ],
)
def test_a_broken_glm_call_becomes_an_observation_that_says_so(call, problem):
  turn = parse_glm(f"a{call}b", SCHEMA)
  assert turn.items[0] == "a" and turn.items[-1] == "b"
  (broken,) = turn.calls
  assert isinstance(broken, ParseError) and problem in broken.problem and broken.text == call
  assert problem in broken.observation


VALUES = st.recursive(
  st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(st.characters(exclude_categories=["Cs"])),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab<>/"}'), inner, max_size=3),
  max_leaves=6,
)


@given(st.dictionaries(st.text("abc", min_size=1), VALUES, max_size=3), st.booleans())
def test_every_hermes_call_that_a_template_writes_is_read_back(arguments, ascii_only):
  text = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only)
  assert parse_hermes(hermes(text)).items == (ToolCall("f", arguments),)


TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@given(st.lists(st.sampled_from([*TAGS, '{"name": "f", "arguments": {}}', "f", "\n", '"', "{", "[", "1"])).map("".join))
def test_no_text_raises(text):
  for turn in (parse_hermes(text), parse_glm(text), parse_glm(text, SCHEMA)):
    assert all(isinstance(item, str | ToolCall | ParseError) for item in turn.items)
    assert all(call.observation for call in turn.calls if isinstance(call, ParseError))
