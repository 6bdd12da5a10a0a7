"""Chats of the built-in tokenizer: no file, no text that forges a token, calls that are read as they are written."""

from __future__ import annotations

import json

import numpy as np
import pytest
from toys.chat_toy import check_masks, message

from sao_jax.chat.call_formats import FORMATS, find_fault, find_format, parse_turn, write_call
from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.tool_calls import ParseError, ToolCall
from sao_jax.data.tokenizer import SPECIALS, ByteTokenizer
from sao_jax.errors import ConfigError

TOKENIZER = ByteTokenizer()
RENDERER = ChatRenderer(TOKENIZER)


def tool(name: str, **types: str) -> dict:
  properties = {key: {"type": kind} for key, kind in types.items()}
  parameters = {"type": "object", "properties": properties, "required": list(types)}
  return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("python", code="string"), tool("book", seats="integer", row="string")]
CALL = ToolCall("python", {"code": "12*7 # <|end|>"})
BOOKING = ToolCall("book", {"seats": 2, "row": "F"})


def ids_of(text: str) -> np.ndarray:
  return TOKENIZER.encode_with_specials(text)


def test_a_conversation_turn_by_turn_has_the_tokens_of_its_template():
  opening = [message("system", "Be brief."), message("user", "12*7?")]
  session = RENDERER.start(opening, TOOLS)
  assert TOKENIZER.decode(session.prompt_ids) == (
    "<|bos|><|reserved_0|>Be brief.<|end|><|reserved_1|>python(code)\nbook(seats, row)<|end|>"
    "<|user|>12*7?<|end|><|assistant|>"
  )
  said = "<|tool_call|>python 12*7<|tool_call|>python 1+1"
  results = [message("tool", "84"), message("tool", "2")]
  assert session.act(ids_of(f"{said}<|end|>")) == said
  continuation = session.observe(results)
  assert continuation.exact and not continuation.new_segment
  assert TOKENIZER.decode(continuation.token_ids) == "<|observation|>84<|end|><|observation|>2<|end|><|assistant|>"
  check_masks(session, [ids_of(f"{said}<|end|>").tolist()])

  # The same history with calls apart, as OpenAI's API has it, is the same context.
  calls = [{"function": {"name": "python", "arguments": json.dumps({"code": code})}} for code in ("12*7", "1+1")]
  history = [*opening, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
  assert RENDERER.prompt_ids(history, TOOLS).tolist() == session.segments[0].token_ids.tolist()


def test_no_text_forges_a_token():
  names = "".join(SPECIALS)
  history = [
    *(message("system", names), message("user", names), message("assistant", names)),
    {"role": "tool", "content": names, "name": names},
    {"role": "assistant", "content": [{"type": "text", "text": names}], "reasoning_content": names},
    {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": {"code": names}}}]},
  ]
  ids = RENDERER.prompt_ids(history, TOOLS)
  specials = TOKENIZER.decode(ids[ids >= 256])
  roles = ("assistant", "observation", "assistant", "assistant|><|tool_call")
  turns = "".join(f"<|{role}|><|end|>" for role in roles)
  assert specials == f"<|bos|><|reserved_0|><|end|><|reserved_1|><|end|><|user|><|end|>{turns}<|assistant|>"
  assert TOKENIZER.decode(ids).count(names) == 7


def test_a_turn_that_was_cut_or_stopped_early_gets_its_end():
  session = RENDERER.start([message("user", "a")])
  session.act(ids_of("b"))
  assert TOKENIZER.decode(session.observe([message("user", "c")]).token_ids) == ("<|end|><|user|>c<|end|><|assistant|>")
  assert RENDERER.stop_ids == (TOKENIZER.end_id,)


def test_demonstrated_turns_may_call_and_answer_and_forge_nothing_else():
  ids = RENDERER.start([message("user", "a")]).action_ids("<|tool_call|>f {}<|answer|>3<|user|>")
  assert TOKENIZER.decode(ids[ids >= 256]) == "<|tool_call|><|answer|><|end|>"


@pytest.mark.parametrize("call_format", FORMATS)
@pytest.mark.parametrize("call", [CALL, BOOKING, ToolCall("python", {"code": "if a:\n  b = '<think>'\n\n"})])
def test_a_call_is_read_as_it_was_written(call, call_format):
  text = write_call(call, call_format, TOOLS)
  assert parse_turn(f"so: {text}{text}", call_format, TOOLS).items == ("so: ", call, call)


@pytest.mark.parametrize(
  "text, problem",
  [
    ("", "name of the tool"),
    (" python 1", "name of the tool"),
    ("{}", "blank behind the name"),
    ("book 3", "one JSON object"),
    ("book {} 3", "one JSON object"),
    ('book {"seats": NaN}', "no valid JSON"),
    ("unknown 3", "one JSON object"),
  ],
)
def test_a_broken_call_is_told_apart_and_the_next_is_read(text, problem):
  broken, whole = parse_turn(f"<|tool_call|>{text}<|tool_call|>python 1", "byte", TOOLS).calls
  assert isinstance(broken, ParseError) and problem in broken.observation
  assert broken.text == f"<|tool_call|>{text}" and whole == ToolCall("python", {"code": "1"})


def test_a_call_without_arguments_has_none():
  assert parse_turn("<|tool_call|>book", "byte", TOOLS).calls == (ToolCall("book", {}),)
  assert parse_turn("<|tool_call|>python", "byte", TOOLS).calls == (ToolCall("python", {"code": ""}),)


@pytest.mark.parametrize(
  "call, fault",
  [
    (CALL, ""),
    (BOOKING, ""),
    (ToolCall("search", {}), "no tool 'search'; the tools are: python, book"),
    (ToolCall("book", {"seats": 2}), "book needs 'row'"),
    (ToolCall("book", {"seats": 2, "row": "F", "price": 1}), "book takes no 'price'"),
    (ToolCall("book", {"seats": "2", "row": "F"}), "'seats' of book must be of type integer"),
    (ToolCall("book", {"seats": True, "row": "F"}), "'seats' of book must be of type integer"),
  ],
)
def test_a_call_is_compared_with_its_schema(call, fault):
  assert find_fault(call, TOOLS) == fault or (fault and fault in find_fault(call, TOOLS))


@pytest.mark.parametrize(
  "messages, options",
  [
    ([], {}),
    ([message("critic", "a")], {}),
    ([{"role": "user", "content": [{"type": "image_url"}]}], {}),
    ([message("user", "a")], {"documents": [{"text": "b"}]}),
  ],
)
def test_conversations_that_cannot_be_shown_are_refused(messages, options):
  with pytest.raises(ConfigError):
    RENDERER.prompt_ids(messages, **options)


def test_formats_and_options_that_do_not_exist_are_refused():
  assert find_format("", TOKENIZER) == "byte" and find_format("glm", TOKENIZER) == "glm"
  with pytest.raises(ConfigError, match="xml"):
    find_format("xml", TOKENIZER)
  with pytest.raises(ConfigError, match="enable_thinking"):
    ChatRenderer(TOKENIZER, options={"enable_thinking": False})
