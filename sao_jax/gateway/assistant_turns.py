"""The text of an assistant's turn as parts of an answer: content, thinking and tool calls; whole, or as it comes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sao_jax.chat.call_formats import CallFormat, parse_turn
from sao_jax.chat.tool_calls import BYTE_CALL, CALL, END_THINK, THINK, ParseError, ToolCall
from sao_jax.gateway.exchange import AnsweredCall, Piece
from sao_jax.gateway.live_text import longest_beginning


class Turn(NamedTuple):
  """A turn's parts: text outside thinking and calls, thinking (None without), and calls."""

  content: str
  reasoning_content: str | None
  tool_calls: tuple[AnsweredCall, ...]


def read_turn(text: str, tools: Sequence[Mapping[str, Any]] | None, *, call_format: CallFormat) -> Turn:
  """Parts the text of a turn.

  Thinking stands between think tags, as in `ChatSession.act`. Calls are looked for only where there are tools; one that
  cannot be read stays content, as it was said, so that the client sees it.

  Args:
    text: the turn, without its stop token.
    tools: those of the request.
    call_format: that of the calls.

  >>> text = '<think>easy</think>I look.<tool_call>{"name": "f", "arguments": {}}</tool_call>'
  >>> turn = read_turn(text, tools=[{}], call_format="hermes")
  >>> turn.content, turn.reasoning_content, turn.tool_calls[0].name
  ('I look.', 'easy', 'f')
  """
  live = LiveTurn(tools, call_format)
  first, last = live.take(text), live.end()
  content = first.content + last.content
  thinking = (first.reasoning_content + last.reasoning_content) if live.thought else None
  if not live.rest:
    return Turn(content, thinking, ())

  # From the first call on, the parser of calls reads.
  parsed = parse_turn(live.rest, call_format, tools)
  for item in parsed.items:
    content += item if isinstance(item, str) else item.text if isinstance(item, ParseError) else ""
  if parsed.thinking:
    thinking = f"{thinking or ''}{parsed.thinking}"
  calls = [item for item in parsed.items if isinstance(item, ToolCall)]
  return Turn(content, thinking, tuple(_answered(call) for call in calls))


def _answered(call: ToolCall) -> AnsweredCall:
  arguments = json.dumps(call.arguments, ensure_ascii=False)
  return AnsweredCall(f"call_{secrets.token_hex(12)}", call.name, arguments)


class LiveTurn:
  """Parts a turn as its text comes, up to the first tool call: what follows that is known only at the end.

  Text between thinking and calls is left out where it is blank.

  Attributes:
    thought: True once thinking has begun.
    rest: the text from the first call on.
  """

  def __init__(self, tools: Sequence[Mapping[str, Any]] | None, call_format: CallFormat):
    """Begins a turn; its calls are looked for where there are tools."""
    self.thought, self.rest = False, ""
    self._call = None if tools is None else BYTE_CALL if call_format == "byte" else CALL
    self._held, self._blank, self._begun, self._inside = "", "", False, False

  def take(self, text: str) -> Piece:
    """Takes further text of the turn; returns what is surely content or thinking."""
    if self.rest:
      self.rest += text
      return Piece()

    self._held += text
    content, thinking = "", ""
    while True:
      # The next mark, or what may be the beginning of one.
      marks = (END_THINK,) if self._inside else (THINK, self._call) if self._call else (THINK,)
      places = {mark: self._held.find(mark) for mark in marks if mark in self._held}
      mark = min(places, key=places.get, default=None)
      place = len(self._held) - longest_beginning(self._held, marks) if mark is None else places[mark]

      # The text before it is known.
      before, self._held = self._held[:place], self._held[place:]
      if self._inside:
        thinking += before
      else:
        content += self._shown(before, closes=mark is not None)
      if mark is None:
        return Piece(content, thinking)

      # Beyond the mark, thinking begins or ends; a call is left to the parser.
      if mark == self._call:
        self.rest, self._held = self._held, ""
        return Piece(content, thinking)
      self._held = self._held[len(mark) :]
      self._inside = mark == THINK
      self.thought = True

  def end(self) -> Piece:
    """Returns what was held back, once the turn has ended; thinking that nothing closes goes on to the end."""
    held, self._held = self._held, ""
    if self._inside:
      return Piece(reasoning_content=held)
    return Piece(self._shown(held, closes=True))

  def _shown(self, text: str, closes: bool) -> str:
    """Holds blank text back until other text follows, or nothing does (`closes`)."""
    text, self._blank = self._blank + text, ""
    shown = self._begun or bool(text.strip())
    self._begun = shown and not closes
    if not shown and not closes:
      self._blank = text
    return text if shown else ""
