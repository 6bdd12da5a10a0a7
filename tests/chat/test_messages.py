"""Conversations in data sets."""

from __future__ import annotations

import pytest

from sao_jax.chat.messages import read_messages, text_of, with_instruction

USER = {"role": "user", "content": "3+4"}


def test_messages_keep_what_templates_may_read():
  call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
  result = {
    "role": "tool",
    "content": [{"type": "text", "text": "7"}, {"text": "."}],
    "tool_call_id": "1",
    "name": None,
  }
  assert read_messages([USER, call, result]) == [
    USER,
    {"role": "assistant", "tool_calls": [{"id": "1"}]},
    {"role": "tool", "content": "7.", "tool_call_id": "1"},
  ]


@pytest.mark.parametrize(
  "value",
  [
    *(None, [], "3+4", [USER, {"role": "assistant", "content": "7"}], [{"role": "robot", "content": "x"}], ["3+4"]),
    *([{"role": "user", "content": content}] for content in (None, " ", 3, [{"type": "image_url", "image_url": "x"}])),
  ],
)
def test_what_is_no_conversation_is_refused(value):
  with pytest.raises(ValueError):
    read_messages(value)


def test_an_instruction_goes_behind_the_systems_own():
  assert with_instruction([USER], "") == [USER]
  assert with_instruction([USER], "Add.") == [{"role": "system", "content": "Add."}, USER]
  own = {"role": "system", "content": "Be brief."}
  assert with_instruction([own, USER], "Add.")[0]["content"] == "Be brief.\n\nAdd."


def test_a_conversation_as_one_text():
  assert text_of("3+4") == text_of([USER]) == "3+4"
  assert text_of([{"role": "system", "content": "Add."}, USER]) == "system: Add.\n\nuser: 3+4"
