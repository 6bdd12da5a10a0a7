"""Conversations as token ids, turn by turn: sampled ids are kept as they are and never tokenised again.

A turn of the policy consists of the tokens that it sampled, its stop token included. The text behind a turn (the
template's own, the observations, the start of the next turn) is the *suffix* of the template's rendering, so the whole
equals the template's rendering of the conversation. The policy's own text is encoded only where a rewriting template
makes it part of the prompt of a new segment.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from sao_jax.chat.byte_chat import BYTE_MARKUP, ByteTemplate
from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.chat.quotes import TURN_MARKUP, Quotes
from sao_jax.chat.segments import Segment, SegmentRecorder
from sao_jax.chat.template import ChatTemplate, Message
from sao_jax.chat.tool_calls import END_THINK, THINK
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.errors import ConfigError

Tools = Documents = Sequence[Mapping[str, Any]] | None


class ChatRenderer:
  """A tokenizer and its chat template: those of a folder, or the built-in ones. Safe to share by threads.

  >>> renderer = ChatRenderer(HFTokenizer(folder))  # a folder with tokenizer.json and a chat template
  >>> ids = renderer.prompt_ids([{"role": "user", "content": "What does <|im_end|> mean?"}])
  >>> print(renderer.tokenizer.decode(ids), end="")
  <|im_start|>user
  What does <|im_end|> mean?<|im_end|>
  <|im_start|>assistant
  >>> ids.tolist().count(renderer.turn_end_id)  # the user's text forges no control token
  1

  Attributes:
    tokenizer: the tokenizer, a folder's or the built-in one.
    stop_ids: tokens that end a turn: the tokenizer's, and those that the template itself writes behind a turn.
    turn_end_id: token that ends a turn when a user's message follows.
  """

  def __init__(self, tokenizer: HFTokenizer | ByteTokenizer, *, options: Mapping[str, Any] | None = None):
    """Compiles the template and finds out how it ends a turn.

    Args:
      tokenizer: the tokenizer. The folder of a `HFTokenizer` has a chat template; a `ByteTokenizer` has `ByteTemplate`.
      options: variables for a folder's template, such as {"enable_thinking": False}.

    Raises:
      ConfigError: when there is no usable template, or it does not show what an assistant said.
    """
    self.tokenizer = tokenizer
    if isinstance(tokenizer, ByteTokenizer):
      self.template, markup = ByteTemplate(options), BYTE_MARKUP
    else:
      self.template = ChatTemplate(tokenizer.folder, {**tokenizer.token_names, **(options or {})})
      markup = TURN_MARKUP
    self.quotes = Quotes(tokenizer.control_names, markup)
    ends = [self._turn_end(role) for role in ("user", "tool")]
    self.turn_end_id = tokenizer.eos_id if ends[0] is None else ends[0]
    self.stop_ids = tuple(dict.fromkeys([*tokenizer.stop_ids, *(end for end in ends if end is not None)]))

  @classmethod
  def of(cls, folder: str, options: Mapping[str, Any] | None = None) -> ChatRenderer:
    """The renderer of a folder with a tokenizer and a chat template, or, for "", of the built-in tokenizer."""
    return cls(HFTokenizer(folder) if folder else ByteTokenizer(), options=options)

  def start(
    self, messages: Sequence[Message], tools: Tools = None, *, documents: Documents = None, rewrite: str = "segment"
  ) -> ChatSession:
    """Begins a conversation; the arguments are those of `ChatSession`."""
    return ChatSession(self, messages, tools, documents=documents, rewrite=rewrite)

  def prompt_ids(
    self,
    messages: Sequence[Message],
    tools: Tools = None,
    *,
    documents: Documents = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
  ) -> Int[np.ndarray, "n"]:
    """Encodes a whole conversation, with exactly one begin-of-sequence token if the tokenizer has them.

    Names of control tokens inside messages, tools and documents stay text.

    Args:
      messages: the conversation.
      tools: JSON schemas of the tools.
      documents: texts to answer from, for templates that know of them.
      add_generation_prompt: True to end with the start of the assistant's turn.
      continue_final_message: True to end with the text of the last message instead, for a policy that goes on with it.

    Raises:
      ConfigError: when the template refuses the conversation, or does not show the message that goes on.
    """
    if continue_final_message:
      return self.encode_start(self._render_open(messages, tools, documents))
    rendered = self.render(messages, tools, documents=documents, add_generation_prompt=add_generation_prompt)
    return self.encode_start(rendered)

  def render(
    self,
    messages: Sequence[Message],
    tools: Tools,
    *,
    documents: Documents = None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
  ) -> str:
    """Renders the conversation with the template; `quotes` hide the names of control tokens inside messages."""
    hide, now = self.quotes.hide, now or datetime.datetime.now()
    return self.template.render(
      hide(messages), hide(tools), documents=hide(documents), add_generation_prompt=add_generation_prompt, now=now
    )

  def encode(self, rendered: str) -> Int[np.ndarray, "n"]:
    """Encodes a part of a rendering that does not begin the sequence."""
    return self.tokenizer.encode_with_specials(rendered, self.quotes.reveal)

  def encode_start(self, rendered: str) -> Int[np.ndarray, "n"]:
    """Encodes a rendering from its beginning on.

    Raises:
      ConfigError: when the template begins with two begin-of-sequence tokens.
    """
    ids, bos = self.encode(rendered), self.tokenizer.bos_id
    if self.tokenizer.adds_bos and ids[:1].tolist() != [bos]:
      return np.concatenate([np.array([bos], dtype=np.int32), ids])
    if bos is not None and ids[:2].tolist() == [bos, bos]:
      raise ConfigError("chat_template", f"{self.template.name} writes bos_token twice.", "Remove one of them.")
    return ids

  def behind_stop(self, suffix: str, stop_id: int | None) -> tuple[Int[np.ndarray, "n"], str]:
    """Returns the part of a suffix that is still to be appended behind a sampled stop token, and its text.

    The suffix begins with the stop token that the template writes there (blanks may precede it). It is left out when
    the policy has sampled it, and so are the blanks, which have no place behind it. If the policy stopped with another
    token, or was cut, all of the suffix is appended.

    Args:
      suffix: the template's text behind the turn.
      stop_id: the stop token that the policy has sampled, None if it was cut.

    Returns:
      (ids to append, the text that stands behind the turn then, stop token included).
    """
    suffix_ids = self.encode(suffix)
    stop = "" if stop_id is None else self.tokenizer.decode([stop_id])
    controls = [place for place, token in enumerate(suffix_ids.tolist()) if token in self.tokenizer.control_ids]
    blanks, _, behind = suffix.partition(stop) if stop else ("", "", suffix)
    is_first = bool(controls) and suffix_ids[controls[0]] == stop_id
    if is_first and not blanks.strip():
      return suffix_ids[controls[0] + 1 :], suffix if controls[0] == 0 else stop + behind
    return suffix_ids, stop + suffix

  def _render_open(self, messages: Sequence[Message], tools: Tools, documents: Documents) -> str:
    """Renders the conversation up to the end of the text of its last message, as transformers does."""
    hidden = self.quotes.hide(messages)
    content = hidden[-1].get("content") if hidden else None
    blocks = content if isinstance(content, list) else [{"text": content}]
    last = next((block for block in reversed(blocks) if isinstance(block.get("text"), str)), None)

    # The text gets an end that can be found again. The blank behind it tells if the template strips texts.
    rendered, found, behind = "", "", ""
    if last is not None:
      said, last["text"] = last["text"], f"{last['text']}{self.quotes.turn} "
      open_message = {**hidden[-1], "content": blocks if isinstance(content, list) else last["text"]}
      whole = self.render([*hidden[:-1], open_message], tools, documents=documents, add_generation_prompt=False)
      rendered, found, behind = whole.rpartition(self.quotes.turn)
    if not found or said.strip() not in rendered:
      raise ConfigError(
        "chat_template",
        f"{self.template.name} does not show the text of the last message, which is to go on.",
        "End with a message that has text, or use a template that shows it verbatim.",
      )
    return rendered if behind.startswith(" ") else rendered.rstrip()

  def _turn_end(self, next_role: str) -> int | None:
    """Finds the control token with which the template ends a turn before a message of `next_role`, if it has one."""
    # The assistant's text must stand in the rendering exactly once: all that follows a turn is found by it.
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

    # The first token behind the turn ends it, if it is a control token.
    suffix = self.encode(rendered.partition(self.quotes.turn)[2])
    first = int(suffix[0]) if len(suffix) else None
    return first if first in self.tokenizer.control_ids else None


@dataclasses.dataclass(frozen=True)
class Continuation:
  """The tokens that follow a turn without being sampled.

  Attributes:
    token_ids: int32 [n], the observations and the start of the next turn; for a new segment its whole prompt.
    new_segment: True when the template has rewritten earlier text, so the ids replace the context instead of extending
      it.
    exact: True when the context, up to how sampled text was tokenised, equals the template's rendering of the
      conversation. It differs where the template changes white space around a turn, where the policy stopped with a
      token that the template does not write, and where `rewrite="keep"` has overruled a rewriting.
  """

  token_ids: Int[np.ndarray, "n"]
  new_segment: bool
  exact: bool


class ChatSession:
  """One conversation: `prompt_ids`, then `act` and `observe` in turn.

  Attributes:
    prompt_ids: int32 [n], the context of the first turn.
  """

  def __init__(
    self,
    renderer: ChatRenderer,
    messages: Sequence[Message],
    tools: Tools = None,
    *,
    documents: Documents = None,
    rewrite: str = "segment",
  ):
    """Begins the conversation. A template that prints the date goes on printing today's, also after midnight.

    Args:
      renderer: the tokenizer and template.
      messages: the messages before the first turn.
      tools: JSON schemas of the tools.
      documents: texts to answer from, for templates that know of them.
      rewrite: "segment" or "keep", the choice when the template rewrites history. "segment" begins a new segment with
        the rewritten conversation as its prompt, as a deployed model would see it. "keep" extends the context all the
        same, so the policy goes on seeing what it wrote. Changed white space around a turn is no rewriting.

    Raises:
      ConfigError: for another `rewrite`, or a conversation that the template refuses.
    """
    if rewrite not in ("segment", "keep"):
      raise ConfigError("rewrite", f"There is no way {rewrite!r} to go on.", 'Use "segment" or "keep".')
    self._renderer, self._rewrite = renderer, rewrite
    self._now = datetime.datetime.now()
    self._messages, self._tools = renderer.quotes.hide(messages), renderer.quotes.hide(tools)
    self._documents = renderer.quotes.hide(documents)
    self._recorder = SegmentRecorder()

    # The open turn: its text, names of control tokens hidden, and its stop token.
    self._said: str | None = None
    self._stop_id: int | None = None

    # Two texts that differ once a rewriting is overruled: the template's rendering, and the policy's context.
    self._rendered = self._render(self._messages)
    self._context = self._rendered
    self.prompt_ids = renderer.encode_start(self._rendered)
    self._recorder.start(self.prompt_ids)

  @property
  def segments(self) -> tuple[Segment, ...]:
    """Everything so far, with the masks of sampled tokens."""
    return self._recorder.segments

  def action_ids(self, text: str) -> Int[np.ndarray, "n"]:
    """Encodes the next turn as if the assistant said the text, for demonstrations.

    The turn is laid out by the template: its text before the assistant's (an empty thinking block, say) and the end of
    the turn are included.
    """
    quotes = self._renderer.quotes
    turn = {"role": "assistant", "content": quotes.turn}
    before = self._render([*self._messages, turn], add_generation_prompt=False).partition(quotes.turn)[0]
    closing = f"{END_THINK}\n\n" if self._opening() else ""
    lead = before.removeprefix(self._rendered) if before.startswith(self._rendered) else closing
    end = np.array([self._renderer.turn_end_id], dtype=np.int32)
    return np.concatenate([self._renderer.encode(lead + quotes.hide_turn(text)), end])

  def act(self, action_ids: Int[np.ndarray, "n"]) -> str:
    """Takes the tokens that the policy sampled in one turn, its stop token included.

    Returns:
      The text that the assistant said, without the stop token. Where the template has already opened the thinking, the
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
    """Takes the messages that answer the turn, at least one, and returns the tokens that lead to the next turn.

    Raises:
      ConfigError: when the template refuses the messages, or does not show the turn where `rewrite` is "keep".
    """
    if self._said is None or not messages:
      raise ValueError("observations follow a turn, and there is at least one")

    # Render the conversation with a stand-in for the turn: the text behind the stand-in is the suffix.
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

    # Render it with the turn itself: does that extend the last rendering, or rewrite it?
    self._messages += [turn, *answers]
    rendered = self._render(self._messages)
    extends = located and (self._rewrite == "keep" or self._extends(rendered, suffix))
    said, self._rendered, self._said = self._said, rendered, None
    if not extends:
      self._context, ids = rendered, self._renderer.encode_start(rendered)
      self._recorder.start(ids)
      return Continuation(ids, new_segment=True, exact=True)

    # Extend the context by the suffix, without the stop token if the policy has sampled that itself.
    ids, text = self._renderer.behind_stop(suffix, self._stop_id)
    self._context += f"{said}{text}"
    self._recorder.append(ids, sampled=False)
    return Continuation(ids, new_segment=False, exact=self._context == rendered)

  def _extends(self, rendered: str, suffix: str) -> bool:
    """Compares the new rendering with the last one + the turn + the suffix; True if only white space differs."""
    if rendered == f"{self._rendered}{self._said}{suffix}":
      return True
    before = rendered.removesuffix(suffix)
    same = "".join(before.split()) == "".join(f"{self._rendered}{self._said}".split())
    return same and rendered.endswith(suffix)

  def _opening(self) -> str:
    """Returns the part of the prompt that has opened the thinking of the turn, "" if none has."""
    place = self._rendered.rstrip().rfind(THINK)
    is_open = place >= 0 and self._rendered.rstrip().endswith(THINK)
    return self._rendered[place:] if is_open else ""

  def _render(self, hidden_messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
    return self._renderer.template.render(
      hidden_messages,
      self._tools,
      documents=self._documents,
      add_generation_prompt=add_generation_prompt,
      now=self._now,
    )
