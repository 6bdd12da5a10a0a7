"""The live sampler behind the API: every request is a session of its own, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from sao_jax.chat.call_formats import find_format
from sao_jax.chat.conversation import ChatRenderer
from sao_jax.data.tokenizer import Tokenizer
from sao_jax.errors import ConfigError
from sao_jax.gateway.assistant_turns import LiveTurn, Turn, read_turn
from sao_jax.gateway.exchange import (
  Answer,
  ChatRequest,
  CompletionRequest,
  Emit,
  Piece,
  SamplingRequest,
  context_exceeded,
)
from sao_jax.gateway.live_text import LiveText, StopSearch
from sao_jax.gateway.request_fields import refuse, unsupported


@dataclasses.dataclass(frozen=True)
class Sampled:
  """Tokens of one turn, as the sampler's `Completion` has them; less where the turn was stopped from outside."""

  token_ids: Sequence[int]
  logprobs: Sequence[float]
  policy_versions: Sequence[int]
  finish_reason: str


class TokenSampler(Protocol):
  """A sampler as this room sees it.

  Attributes:
    context_length: tokens of a prompt and its answer.
    vocab_size: ids are below it.
    top_p: the only one that it samples with.
  """

  context_length: int
  vocab_size: int
  top_p: float

  async def sample(
    self,
    prompt_ids: Sequence[int],
    *,
    rollout_id: int,
    max_tokens: int,
    stop_ids: tuple[int, ...],
    temperature: float,
    on_tokens: Callable[[Sequence[int]], bool] | None = None,
  ) -> Sampled:
    """Samples one turn of a new session; frees its slot when it ends, also by cancellation.

    Args:
      prompt_ids: the context.
      rollout_id: determines the random numbers.
      max_tokens, stop_ids, temperature: as in `GenerateRequest`.
      on_tokens: called in the event loop with tokens as they are sampled; ends the turn by returning False.

    Raises:
      RequestRefused: the sampler has ended.
    """
    ...


class SamplerBackend:
  """Answers requests by sampling. It keeps no conversation; safe to share by all clients."""

  def __init__(
    self,
    sampler: TokenSampler,
    tokenizer: Tokenizer,
    *,
    model: str,
    renderer: ChatRenderer | None = None,
    call_format: str = "",
    stop_ids: Sequence[int] = (),
    max_choices: int = 16,
  ):
    """Takes what makes text of tokens.

    Args:
      sampler: samples.
      tokenizer: the policy's.
      model: the policy's name for clients.
      renderer: its chat template; without one there are only completions.
      call_format: that of its tool calls; "": the tokenizer's own.
      stop_ids: tokens that end a completion of text.
      max_choices: the largest `n`.
    """
    self.models, self.max_choices, self.gives_logprobs = (model,), max_choices, True
    self._sampler, self._tokenizer, self._renderer = sampler, tokenizer, renderer
    self._call_format, self._stop_ids = find_format(call_format, tokenizer), tuple(stop_ids)

  async def chat(self, request: ChatRequest, emit: Emit | None = None) -> Answer:
    """Goes on with a conversation; see `Backend.chat`."""
    if self._renderer is None:
      raise unsupported("messages", "this policy has no chat template; use /v1/completions.")
    if request.must_call:
      raise unsupported("tool_choice", 'this server takes "none" and "auto"; it cannot force a call.')
    prompt_ids, opening = await asyncio.to_thread(self._prompt, request)
    read = lambda text: read_turn(opening + text, request.tools, call_format=self._call_format)
    live = LiveTurn(request.tools, self._call_format)
    opened = [live.take(opening)]  # the template's part of the answer, shown with the first sampled one

    def show(text: str) -> Piece:
      before, piece = opened.pop() if opened else Piece(), live.take(text)
      return Piece(before.content + piece.content, before.reasoning_content + piece.reasoning_content)

    return await self._answer(request, prompt_ids, self._renderer.stop_ids, read, show, emit)

  async def complete(self, request: CompletionRequest, emit: Emit | None = None) -> Answer:
    """Goes on with a text. Names of special tokens in it stand for the tokens: the client writes the whole context."""
    if isinstance(request.prompt, str):
      prompt_ids = await asyncio.to_thread(self._encode, request.prompt)
    else:
      prompt_ids = np.array(request.prompt, np.int64)
      if prompt_ids.max() >= self._sampler.vocab_size:
        raise refuse("prompt", f"there is no token {prompt_ids.max()}; ids are below {self._sampler.vocab_size}.")
    read = lambda text: Turn(text, None, ())
    return await self._answer(request, prompt_ids, self._stop_ids, read, Piece, emit)

  def _prompt(self, request: ChatRequest) -> tuple[np.ndarray, str]:
    """Renders a conversation; returns its ids, and the text with which the template has opened the answer."""
    try:
      session = self._renderer.start(request.messages, request.tools)
    except ConfigError as error:
      raise refuse("messages", error.problem, "invalid_conversation") from error
    return session.prompt_ids, session.act(np.zeros(0, np.int32))

  def _encode(self, text: str) -> np.ndarray:
    ids, bos = self._tokenizer.encode_with_specials(text), self._tokenizer.bos_id
    begins = self._tokenizer.adds_bos and ids[:1].tolist() != [bos]
    return np.concatenate([np.array([bos], np.int32), ids]) if begins else ids

  async def _answer(
    self,
    request: SamplingRequest,
    prompt_ids: np.ndarray,
    stop_ids: tuple[int, ...],
    read: Callable[[str], Turn],
    show: Callable[[str], Piece],
    emit: Emit | None,
  ) -> Answer:
    """Samples behind a prompt.

    Args:
      request: the rules.
      prompt_ids: the context.
      stop_ids: tokens that end the answer.
      read: parts the whole text.
      show: parts further text as far as that is sure.
      emit: of the client.
    """
    # What is refused before it takes a slot.
    room = self._sampler.context_length - len(prompt_ids)
    if room < 1:
      raise context_exceeded(len(prompt_ids), self._sampler.context_length)
    if request.top_p not in (None, self._sampler.top_p):
      raise unsupported("top_p", f"this policy is sampled with {self._sampler.top_p:g}.")

    # Tokens are looked at as they come only where somebody waits for them.
    text = _AnswerText(self._tokenizer.decode, stop_ids, request.stop, None if emit is None else _shown(show, emit))
    sampled = await self._sampler.sample(
      prompt_ids,
      rollout_id=_rollout_id(request.seed),
      max_tokens=min(request.max_tokens or room, room),
      stop_ids=stop_ids,
      temperature=1.0 if request.temperature is None else request.temperature,
      on_tokens=text.take if emit is not None or request.stop else None,
    )

    # The rest of the tokens, or all of them; then the text is whole.
    text.take(sampled.token_ids[text.count :])
    turn, count = read(text.end()), text.count
    reason = "stop" if text.stopped or sampled.finish_reason == "stop" else "length"

    # The account; facts of the tokens where they are asked for.
    token_ids = [int(token) for token in sampled.token_ids[:count]]
    texts = await asyncio.to_thread(self._texts, token_ids) if request.token_facts else []
    return Answer(
      content=turn.content or (None if turn.tool_calls else ""),
      reasoning_content=turn.reasoning_content,
      tool_calls=turn.tool_calls,
      finish_reason="tool_calls" if turn.tool_calls and reason == "stop" else reason,
      prompt_tokens=len(prompt_ids),
      completion_tokens=count,
      prompt_token_ids=prompt_ids.tolist(),
      token_ids=token_ids,
      token_texts=texts,
      logprobs=sampled.logprobs[:count],
      policy_versions=sampled.policy_versions[:count],
    )

  def _texts(self, token_ids: Sequence[int]) -> list[str]:
    return [self._tokenizer.decode([token]) for token in token_ids]


class _AnswerText:
  """The text of an answer as its tokens come.

  Attributes:
    count: the number of tokens that belong to the answer so far; a stop token does, what follows a stop text does not.
  """

  def __init__(
    self,
    decode: Callable[[list[int]], str],
    stop_ids: tuple[int, ...],
    stop: tuple[str, ...],
    show: Callable[[str], None] | None,
  ):
    self._live, self._search = LiveText(decode), StopSearch(stop)
    self._stop_ids, self._one_by_one, self._show = stop_ids, bool(stop), show
    self._texts: list[str] = []
    self.count = 0

  @property
  def stopped(self) -> bool:
    """True once a stop text was found."""
    return self._search.found

  def take(self, token_ids: Sequence[int]) -> bool:
    """Takes further tokens; returns False where the answer ends before them."""
    step = 1 if self._one_by_one else max(len(token_ids), 1)  # which token completes a stop text?
    for start in range(0, len(token_ids), step):
      if self.stopped:
        break
      ids = [int(token) for token in token_ids[start : start + step]]
      self.count += len(ids)
      self._add(self._search.take(self._live.take(ids[:-1] if ids[-1] in self._stop_ids else ids)))
    return not self.stopped

  def end(self) -> str:
    """Returns the whole text, once no token follows."""
    self._add(self._search.take(self._live.end()))
    self._add(self._search.end())
    return "".join(self._texts)

  def _add(self, text: str) -> None:
    if text:
      self._texts.append(text)
      if self._show is not None:
        self._show(text)


def _shown(show: Callable[[str], Piece], emit: Emit) -> Callable[[str], None]:
  def emit_piece(text: str) -> None:
    piece = show(text)
    if piece.content or piece.reasoning_content:
      emit(piece)

  return emit_piece


def _rollout_id(seed: int | None) -> int:
  """The number of a rollout, 31 bits: the same for the same seed."""
  if seed is None:
    return secrets.randbelow(2**31)
  return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest()) >> 1
