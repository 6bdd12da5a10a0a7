"""Turns that an agent writes down in its own way are the same turns; anything else is another history (case T4)."""

from __future__ import annotations

import pytest

from sao_jax.gateway.exchange import Answer, AnsweredCall, ChatRequest
from sao_jax.gateway.history import History

TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}, "b": {}}}}},)
ASKED = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "12*7?"})
ANSWER = Answer(
  content="I look.",
  finish_reason="tool_calls",
  reasoning_content="easy",
  tool_calls=(AnsweredCall("call_1", "f", '{"a": 1, "b": [2.0, null]}'),),
)
RESULT = {"role": "tool", "content": "84", "tool_call_id": "call_1"}


def said(content="I look.", name="f", arguments=None, call_id="call_1", **more):
  call = {
    "id": call_id,
    "type": "function",
    "function": {"name": name, "arguments": arguments or {"a": 1, "b": [2, None]}},
  }
  return {"role": "assistant", "content": content, "tool_calls": [call], **more}


def further(turn, *, asked=ASKED, tools=TOOLS, answer=ANSWER, behind=(RESULT,)):
  history = History(ChatRequest(messages=ASKED, tools=TOOLS))
  history.answered(answer)
  return history.further(ChatRequest(messages=(*asked, turn, *behind), tools=tools))


@pytest.mark.parametrize(
  "turn",
  [
    said(),
    said(arguments={"b": [2.0, None], "a": 1.0}),  # another order, other numbers for the same values
    said(" I look.\n"),
    said(reasoning_content="easy"),
    said(reasoning_content="something else"),
    said(call_id="other"),
  ],
)
def test_the_same_turn(turn):
  assert further(turn) == (RESULT,)


@pytest.mark.parametrize("content", ["", None])
def test_no_text_is_no_text(content):
  answer = Answer(content=None, finish_reason="tool_calls", tool_calls=ANSWER.tool_calls)
  assert further(said(content), answer=answer) == (RESULT,)


@pytest.mark.parametrize(
  "change",
  [
    {"turn": said("I look!")},
    {"turn": said(arguments={"a": 1, "b": [2, 3]})},
    {"turn": said(name="g")},
    {"turn": {"role": "assistant", "content": "I look."}},
    {"turn": said(), "asked": ASKED[1:]},  # compacted
    {"turn": said(), "asked": (ASKED[0], {"role": "user", "content": "12*8?"})},
    {"turn": said(), "tools": None},
    {"turn": said(), "behind": ()},  # nothing new
    {"turn": {"role": "user", "content": "I look."}},
  ],
)
def test_another_history(change):
  assert further(**change) is None


def test_what_follows_is_remembered_too():
  history = History(ChatRequest(messages=ASKED))
  history.answered(Answer(content="84", finish_reason="stop"))
  told = (*ASKED, {"role": "assistant", "content": "84"}, {"role": "user", "content": "Why?"})
  assert history.further(ChatRequest(messages=told)) == told[3:]
  history.answered(Answer(content="So.", finish_reason="stop"))
  more = (*told, {"role": "assistant", "content": "So."}, {"role": "user", "content": "Sure?"})
  assert history.further(ChatRequest(messages=(*more[:3], *more[4:]))) is None
  assert history.further(ChatRequest(messages=more)) == more[-1:]
