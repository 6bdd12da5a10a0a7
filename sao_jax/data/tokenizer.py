"""The built-in tokenizer: one token per byte, and special tokens that only trusted code can write."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int

NUM_BYTES = 256
NUM_SPECIALS = 16  # named ones and reserved ones
NAMED = ("pad", "bos", "eos", "user", "assistant", "tool_call", "observation", "answer", "end")
SPECIALS = tuple(f"<|{name}|>" for name in NAMED) + tuple(f"<|reserved_{i}|>" for i in range(NUM_SPECIALS - len(NAMED)))
SPECIAL_PATTERN = re.compile("(" + "|".join(re.escape(special) for special in SPECIALS) + ")")


class Tokenizer(Protocol):
  """The interface of every tokenizer; `ByteTokenizer` and `HFTokenizer` describe it in more detail."""

  vocab_size: int

  def encode(self, text: str) -> Int[np.ndarray, "n"]:
    """Encodes any text as int32 ids, none of them special."""
    ...

  def encode_with_specials(self, template: str) -> Int[np.ndarray, "n"]:
    """Encodes trusted text, in which the names of special tokens stand for the tokens, as int32 ids."""
    ...

  def decode(self, token_ids: Sequence[int] | Int[np.ndarray, "n"]) -> str:
    """Decodes ids to text for people."""
    ...

  def decode_bytes(self, token_ids: Sequence[int] | Int[np.ndarray, "n"]) -> str | None:
    """Decodes ids that are nothing but text; returns None for others."""
    ...


class ByteTokenizer:
  """Ids 0..255 are bytes, ids 256..271 are special tokens. It has no state.

  `<|eos|>` ends a document, `<|end|>` ends a turn. `encode` never produces a special token, so text from users, tools
  and data sets cannot forge a turn.
  """

  vocab_size = NUM_BYTES + NUM_SPECIALS
  pad_id, bos_id, eos_id, user_id, assistant_id, tool_call_id, observation_id, answer_id, end_id = range(
    NUM_BYTES, NUM_BYTES + len(NAMED)
  )
  # What chats need to know of a tokenizer, as `HFTokenizer` tells it.
  control_ids, control_names = frozenset(range(NUM_BYTES, NUM_BYTES + NUM_SPECIALS)), SPECIALS
  stop_ids, adds_bos = (end_id,), True

  def encode(self, text: str) -> Int[np.ndarray, "n"]:
    """Encodes any text as its UTF-8 bytes, int32; the characters `<|end|>` stay seven bytes."""
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

  def encode_with_specials(self, template: str, restore: Callable[[str], str] = str) -> Int[np.ndarray, "n"]:
    """Encodes *trusted* text, in which the names of special tokens stand for the tokens.

    Args:
      template: the text.
      restore: function applied to the text between special tokens before it is encoded; its result is plain text.
    """
    pieces = [
      np.array([NUM_BYTES + SPECIALS.index(text)], dtype=np.int32) if text in SPECIALS else self.encode(restore(text))
      for text in SPECIAL_PATTERN.split(template)
    ]
    return np.concatenate(pieces)

  def decode(self, token_ids: Sequence[int] | Int[np.ndarray, "n"]) -> str:
    """Decodes ids to text for people: special tokens by name, invalid UTF-8 and ids of a model's padded rows as U+FFFD.

    To parse a policy's action, use `decode_bytes`: here a special token and the text of its name look the same.

    Raises:
      ValueError: for negative ids.
    """
    ids = np.asarray(token_ids, dtype=np.int64).tolist()
    if ids and min(ids) < 0:
      raise ValueError(f"token id {min(ids)} is negative")
    beyond = "\ufffd".encode()
    chunks = [
      bytes([i]) if i < NUM_BYTES else SPECIALS[i - NUM_BYTES].encode() if i < self.vocab_size else beyond for i in ids
    ]
    return b"".join(chunks).decode("utf-8", errors="replace")

  def decode_bytes(self, token_ids: Sequence[int] | Int[np.ndarray, "n"]) -> str | None:
    """Decodes ids that are all bytes of valid UTF-8, else returns None: the safe way to read a policy's action."""
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= NUM_BYTES):
      return None
    try:
      return ids.astype(np.uint8).tobytes().decode("utf-8")
    except UnicodeDecodeError:
      return None
