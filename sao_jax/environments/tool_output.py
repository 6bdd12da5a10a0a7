"""The output of tools, cut by tokens: its beginning and its end stay, and a marker says how much was left out."""

from __future__ import annotations

import os

from sao_jax.data.tokenizer import Tokenizer

MIN_TOKENS = 64  # the fewest that leave room for text beside the marker, whatever the tokenizer


def clip_tokens(text: str, tokenizer: Tokenizer, max_tokens: int) -> str:
  """Returns a text of at most so many tokens: the text itself, or its beginning and end around a marker.

  Whole characters are kept. Half of a surrogate pair, which no tokenizer takes, becomes a question mark.

  >>> from sao_jax.data.tokenizer import ByteTokenizer
  >>> clip_tokens("a" * 50 + "b" * 50, ByteTokenizer(), 64)
  'aaaaaaaaaaaaaaaaa\\n[... 66 tokens left out ...]\\nbbbbbbbbbbbbbbbbb'

  Args:
    text: any text.
    tokenizer: counts the tokens, by `encode`.
    max_tokens: the most tokens that the result may have, marker included; at least MIN_TOKENS.
  """
  if max_tokens < MIN_TOKENS:
    raise ValueError(f"{max_tokens} tokens leave no room for text beside a marker, {MIN_TOKENS} do")
  text = text.encode("utf-8", "replace").decode("utf-8")
  ids = tokenizer.encode(text)
  if len(ids) <= max_tokens:
    return text

  # Beginning and end are shortened until all of it fits: where a text is cut, it may become other tokens than before.
  room = max_tokens
  while True:
    head = _common(text, tokenizer.decode(ids[: (room + 1) // 2]))
    tail = _common(text[::-1], tokenizer.decode(ids[len(ids) - room // 2 :])[::-1])[::-1]
    kept = len(tokenizer.encode(head)) + len(tokenizer.encode(tail))
    clipped = f"{head}\n[... {len(ids) - kept} tokens left out ...]\n{tail}"
    excess = len(tokenizer.encode(clipped)) - max_tokens
    if excess <= 0:
      return clipped
    room = max(0, room - excess)


def _common(text: str, decoded: str) -> str:
  """Returns the longest common beginning: of decoded ids, the characters that are whole."""
  return os.path.commonprefix([text, decoded])
