"""Conversations as token ids, turn by turn: what the policy sampled is kept id by id and never tokenised again.

A turn of the policy is what it sampled, its stop token included. What follows it (the template's text behind the turn,
the observations, the start of the next turn) is the *suffix* of the template's rendering, so the whole equals what the
template makes of the conversation. What the policy wrote is encoded only as part of the prompt of a new segment.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.chat.quotes import Quotes
from sao_jax.chat.segments import Segment, SegmentRecorder
from sao_jax.chat.template import ChatTemplate, Message
from sao_jax.errors import ConfigError

Tools = Sequence[Mapping[str, Any]] | None
THINK, END_THINK = "<think>", "</think>"


class ChatRenderer:
  """A folder's tokenizer and chat template. It has no state of a conversation; safe to share by threads.

  Attributes:
    tokenizer: the tokenizer.
    stop_ids: tokens that end a turn: the tokenizer's, and those that the template itself writes behind a turn.
    turn_end_id: what ends a turn that a user's message follows.
  """

  def __init__(self, tokenizer: HFTokenizer, *, options: Mapping[str, Any] | None = None):
    """Compiles the folder's template and finds out how it ends a turn.

    Args:
      tokenizer: of a folder with a chat template.
      options: variables for the template, such as {"enable_thinking": False}.

    Raises:
      ConfigError: when there is no usable template, or it does not show what an assistant said.
    """
    self.tokenizer = tokenizer
    self.template = ChatTemplate(tokenizer.folder, {**tokenizer.token_names, **(options or {})})
    self.quotes = Quotes(tokenizer.control_names)
    ends = [self._turn_end(role) for role in ("user", "tool")]
    self.turn_end_id = tokenizer.eos_id if ends[0] is None else ends[0]
    self.stop_ids = tuple(dict.fromkeys([*tokenizer.stop_ids, *(end for end in ends if end is not None)]))

  def start(self, messages: Sequence[Message], tools: Tools = None, *, rewrite: str = "segment") -> ChatSession:
    """Begins a conversation, see `ChatSession`."""
    return ChatSession(self, messages, tools, rewrite=rewrite)

  def prompt_ids(
    self, messages: Sequence[Message], tools: Tools = None, *, add_generation_prompt: bool = True
  ) -> Int[np.ndarray, "n"]:
    """Token ids of a whole conversation, with exactly one begin-of-sequence token if the tokenizer has them.

    Names of control tokens inside messages and tools stay text.
    """
    return self.encode_start(self.render(messages, tools, add_generation_prompt=add_generation_prompt))

  def render(
    self,
    messages: Sequence[Message],
    tools: Tools,
    *,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
  ) -> str:
    """The template's text, in which names of control tokens inside messages are hidden by `quotes`."""
    hide = self.quotes.hide
    now = now or datetime.datetime.now()
    return self.template.render(hide(messages), hide(tools), add_generation_prompt=add_generation_prompt, now=now)

  def encode(self, rendered: str) -> Int[np.ndarray, "n"]:
    """Ids of a part of a rendering that starts behind the beginning of the sequence."""
    return self.tokenizer.encode_with_specials(rendered, self.quotes.reveal)

  def encode_start(self, rendered: str) -> Int[np.ndarray, "n"]:
    """Ids of a rendering from its beginning on.

    Raises:
      ConfigError: when the template begins with two begin-of-sequence tokens.
    """
    ids, bos = self.encode(rendered), self.tokenizer.bos_id
    if self.tokenizer.adds_bos and ids[:1].tolist() != [bos]:
      return np.concatenate([np.array([bos], dtype=np.int32), ids])
    if bos is not None and ids[:2].tolist() == [bos, bos]:
      raise ConfigError("chat_template", f"{self.template.name} writes bos_token twice.", "Remove one of them.")
    return ids

  def behind_stop(self, suffix_ids: Int[np.ndarray, "n"], stop_id: int | None) -> Int[np.ndarray, "n"]:
    """The part of a suffix that stands behind a sampled stop token.

    The stop token that the template writes there (blanks may precede it) is the sampled one. If the policy stopped
    with another one, or was cut, the template's own is appended as well.
    """
    controls = [place for place, token in enumerate(suffix_ids.tolist()) if token in self.tokenizer.control_ids]
    if stop_id is None or not controls or suffix_ids[controls[0]] != stop_id:
      return suffix_ids
    blank = not self.tokenizer.decode(suffix_ids[: controls[0]]).strip()
    return suffix_ids[controls[0] + 1 :] if blank else suffix_ids

  def _turn_end(self, next_role: str) -> int | None:
    """The control token with which the template ends a turn before a message of `next_role`, if it has one."""
    turn = {"role": "assistant", "content": self.quotes.turn}
    opening = [{"role": "user", "content": "a"}, turn]
    if self.render(opening, None, add_generation_prompt=False).count(self.quotes.turn) != 1:
      raise ConfigError(
        "chat_template",
        f"{self.template.name} does not show what an assistant said exactly once and verbatim.",
        "Use a template that does, so that sampled tokens have a place in it.",
      )
    try:
      rendered = self.render([*opening, {"role": next_role, "content": "b"}], None)
    except ConfigError:
      return None  # a template without tools refuses the role
    suffix = self.encode(rendered.partition(self.quotes.turn)[2])
    first = int(suffix[0]) if len(suffix) else None
    return first if first in self.tokenizer.control_ids else None


@dataclasses.dataclass(frozen=True)
class Continuation:
  """What the harness appends behind a turn.

  Attributes:
    token_ids: int32 [n], none of them sampled: observations and the start of the next turn; for a new segment its
      whole prompt.
    new_segment: the template has rewritten what came before, so the ids replace the context instead of extending it.
    exact: the context, up to how sampled text was tokenised, is what the template makes of the conversation. It is not
      where the template changes white space around a turn, where the policy stopped with a token that the template does
      not write, and where a rewriting was overruled.
  """

  token_ids: Int[np.ndarray, "n"]
  new_segment: bool
  exact: bool


class ChatSession:
  """One conversation: `prompt_ids`, then `act` and `observe` in turn.

  Attributes:
    prompt_ids: int32 [n], what the first turn is sampled from.
  """

  def __init__(
    self, renderer: ChatRenderer, messages: Sequence[Message], tools: Tools = None, *, rewrite: str = "segment"
  ):
    """Begins the conversation; templates that print the date print today's until its end.

    Args:
      renderer: the tokenizer and template.
      messages: what precedes the first turn.
      tools: JSON schemas of the tools.
      rewrite: what happens when the template rewrites history. "segment": a new segment begins with the rewritten
        conversation as its prompt, as a deployed model would see it. "keep": the context is extended all the same, so
        the policy goes on seeing what it wrote. White space that a template changes around a turn is no rewriting.

    Raises:
      ConfigError: for another `rewrite`, or a conversation that the template refuses.
    """
    if rewrite not in ("segment", "keep"):
      raise ConfigError("rewrite", f"There is no way {rewrite!r} to go on.", 'Use "segment" or "keep".')
    self._renderer, self._rewrite = renderer, rewrite
    self._now = datetime.datetime.now()
    self._messages, self._tools = renderer.quotes.hide(messages), renderer.quotes.hide(tools)
    self._recorder = SegmentRecorder()
    self._said: str | None = None  # the turn that no observation has followed yet, names of control tokens hidden
    self._stop_id: int | None = None
    self._rendered = self._render(self._messages)  # what the template makes of the conversation
    self._context = self._rendered  # what the policy sees, as text
    self.prompt_ids = renderer.encode_start(self._rendered)
    self._recorder.start(self.prompt_ids)

  @property
  def segments(self) -> tuple[Segment, ...]:
    """Everything so far, with the mask of what was sampled."""
    return self._recorder.segments

  def action_ids(self, text: str) -> Int[np.ndarray, "n"]:
    """Ids of the next turn if the assistant says the text, as the template lays it out: for demonstrations.

    What the template puts before the text (an empty thinking block, say) and the end of the turn are part of it.
    """
    quotes = self._renderer.quotes
    turn = {"role": "assistant", "content": quotes.turn}
    before = self._render([*self._messages, turn], add_generation_prompt=False).partition(quotes.turn)[0]
    closing = f"{END_THINK}\n\n" if self._opening() else ""
    lead = before.removeprefix(self._rendered) if before.startswith(self._rendered) else closing
    end = np.array([self._renderer.turn_end_id], dtype=np.int32)
    return np.concatenate([self._renderer.encode(lead + quotes.hide_turn(text)), end])

  def act(self, action_ids: Int[np.ndarray, "n"]) -> str:
    """Takes what the policy sampled in one turn, its stop token included.

    Returns:
      What the assistant said: the text without the stop token. Where the template has already opened the thinking, the
      text starts with that opening, so that thinking is always delimited on both sides.
    """
    if self._said is not None:
      raise ValueError("two turns without an observation between them")
    ids = np.asarray(action_ids, dtype=np.int32)
    self._recorder.append(ids, sampled=True)
    self._stop_id = int(ids[-1]) if len(ids) and ids[-1] in self._renderer.stop_ids else None
    text = self._renderer.tokenizer.decode(ids if self._stop_id is None else ids[:-1])
    self._said = self._renderer.quotes.hide_turn(text)
    return self._opening() + text

  def observe(self, messages: Sequence[Message]) -> Continuation:
    """Takes at least one message that answers the turn, and goes on to the next turn.

    Raises:
      ConfigError: when the template refuses the messages, or does not show the turn where `rewrite` is "keep".
    """
    if self._said is None or not messages:
      raise ValueError("observations follow a turn, and there is at least one")
    answers = self._renderer.quotes.hide(messages)
    turn = {"role": "assistant", "content": self._opening() + self._said}
    sought = {"role": "assistant", "content": self._renderer.quotes.turn}
    _, found, suffix = self._render([*self._messages, sought, *answers]).partition(sought["content"])
    located = bool(found) and sought["content"] not in suffix
    if not located and self._rewrite == "keep":
      raise ConfigError(
        "chat_template",
        f"{self._renderer.template.name} does not show the last turn exactly once, so nothing can be put behind it.",
        'Use rewrite="segment", or a template that keeps the turns of assistants.',
      )
    self._messages += [turn, *answers]
    rendered = self._render(self._messages)
    extends = located and (self._rewrite == "keep" or self._extends(rendered, suffix))
    said, self._rendered, self._said = self._said, rendered, None
    if not extends:
      self._context, ids = rendered, self._renderer.encode_start(rendered)
      self._recorder.start(ids)
      return Continuation(ids, new_segment=True, exact=True)
    suffix_ids = self._renderer.encode(suffix)
    ids = self._renderer.behind_stop(suffix_ids, self._stop_id)
    is_other_stop = self._stop_id is not None and len(ids) == len(suffix_ids)
    stop = self._renderer.tokenizer.decode([self._stop_id]) if is_other_stop else ""
    self._context += f"{said}{stop}{suffix}"
    self._recorder.append(ids, sampled=False)
    return Continuation(ids, new_segment=False, exact=self._context == rendered)

  def _extends(self, rendered: str, suffix: str) -> bool:
    """Whether the new rendering is the last one, then what was said, then the suffix, but for white space."""
    if rendered == f"{self._rendered}{self._said}{suffix}":
      return True
    before = rendered.removesuffix(suffix)
    same = "".join(before.split()) == "".join(f"{self._rendered}{self._said}".split())
    return same and rendered.endswith(suffix)

  def _opening(self) -> str:
    """The part of the prompt that opened the thinking of the turn, if it did."""
    place = self._rendered.rstrip().rfind(THINK)
    is_open = place >= 0 and self._rendered.rstrip().endswith(THINK)
    return self._rendered[place:] if is_open else ""

  def _render(self, hidden_messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
    return self._renderer.template.render(
      hidden_messages, self._tools, add_generation_prompt=add_generation_prompt, now=self._now
    )
