"""Texts and turns in pieces are the whole ones, wherever the borders are."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
from toys.gateway_toy import ADD, BYTES

from sao_jax.gateway.assistant_turns import LiveTurn, read_turn
from sao_jax.gateway.live_text import LiveText, StopSearch

CALL = {
  "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
  "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
  "byte": '<|tool_call|>add {"a": 1}',
}
WORDS = st.sampled_from(["<think>", "</think>", "<tool_call>", "<", " ", "\n", "a", "ö", *CALL.values()])


def pieces(text, borders):
  places = sorted({0, len(text), *(border % (len(text) + 1) for border in borders)})
  return [text[a:b] for a, b in zip(places, places[1:])]


@hypothesis.given(st.binary(max_size=30), st.lists(st.integers(0, 30)))
def test_no_character_is_halved(data, borders):
  live = LiveText(BYTES.decode)
  parts = [live.take(list(part)) for part in pieces(data, borders)]
  assert "".join([*parts, live.end()]).replace("\ufffd", "") == data.decode("utf-8", errors="ignore")


def test_the_end_of_a_character_is_awaited_but_not_for_ever():
  live = LiveText(BYTES.decode)
  assert [live.take([byte]) for byte in "a🙂b".encode()] == ["a", "", "", "", "🙂", "b"]
  assert live.take([0xFF, 97]) == "\ufffda"
  assert live.take([0xF0, 0x9F]) == "" and live.end() == "\ufffd"


@hypothesis.given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=3), max_size=4), st.data())
def test_stop_texts_are_found_across_borders(text, stop, data):
  search = StopSearch(stop)
  parts = [search.take(part) for part in pieces(text, data.draw(st.lists(st.integers(0, 20))))]
  shown = "".join([*parts, search.end()])

  # By definition: the shortest beginning of the text that ends in a stop text, without that.
  ends = [(n, word) for n in range(len(text) + 1) for word in stop if text[:n].endswith(word)]
  if not ends:
    assert shown == text and not search.found
  else:
    place = min(text.find(word) for word in stop if word in text)
    assert search.found and len(shown) <= min(n for n, _ in ends) and text.startswith(shown)
    assert place <= len(shown) <= min(n for n, _ in ends) or len(shown) == place


@pytest.mark.parametrize("call_format", CALL)
@hypothesis.given(st.lists(WORDS, max_size=8), st.lists(st.integers(0, 200)), st.booleans())
def test_a_turn_in_pieces_is_the_beginning_of_the_whole_one(call_format, words, borders, with_tools):
  text, tools = "".join(words), [ADD] if with_tools else None
  turn, live = read_turn(text, tools, call_format=call_format), LiveTurn(tools, call_format)
  shown = [live.take(part) for part in pieces(text, borders)]
  assert turn.content.startswith("".join(piece.content for piece in shown))
  assert (turn.reasoning_content or "").startswith("".join(piece.reasoning_content for piece in shown))


@pytest.mark.parametrize("call_format", CALL)
def test_a_turn_has_three_parts(call_format):
  text = f"<think>\neasy\n</think>\n\nI add.{CALL[call_format]}"
  turn = read_turn(text, [ADD], call_format=call_format)
  assert turn.content == "\n\nI add." and turn.reasoning_content == "\neasy\n"
  ((call_id, name, arguments),) = [(call.id, call.name, call.arguments) for call in turn.tool_calls]
  assert call_id.startswith("call_") and (name, arguments) == ("add", '{"a": 1}')

  # Without tools nobody asked for calls, and what looks like one is text.
  assert read_turn(text, None, call_format=call_format).content == f"\n\nI add.{CALL[call_format]}"


def test_a_call_that_cannot_be_read_stays_to_be_seen():
  turn = read_turn("well <tool_call>{add</tool_call> so", [ADD], call_format="hermes")
  assert turn.content == "well <tool_call>{add</tool_call> so" and not turn.tool_calls


def test_thinking_that_nothing_closes_goes_on_to_the_end():
  assert read_turn("<think>a <b", None, call_format="hermes")[:2] == ("", "a <b")
  assert read_turn("a", None, call_format="hermes")[:2] == ("a", None)
