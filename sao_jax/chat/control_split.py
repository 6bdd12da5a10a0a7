"""Trusted text, split at the names of control tokens: exactly where the `tokenizers` package itself finds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

UNKNOWN = "[UNK]"


class ControlSplitter:
  """Finds added tokens as the package does, by a tokenizer that has nothing else. Safe to share by threads.

  A token may take blanks beside it with it, match whole words or the normalised text only, and be part of a longer one.
  """

  def __init__(self, tokenizer: Any, controls: Mapping[str, int]):
    """Takes over what finds tokens.

    Args:
      tokenizer: the `tokenizers.Tokenizer`, with all its added tokens.
      controls: ids of the control tokens by name; other added tokens count as text, but hide those inside them.
    """
    import tokenizers

    model = tokenizers.models.WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN)  # all other text is one unknown word
    self._finder = tokenizers.Tokenizer(model)
    if tokenizer.normalizer is not None:
      self._finder.normalizer = tokenizer.normalizer
    added = tokenizer.get_added_tokens_decoder()
    self._finder.add_tokens([added[token_id] for token_id in sorted(added)])
    named = {self._finder.token_to_id(name): token_id for name, token_id in controls.items()}
    self._controls = {found: token_id for found, token_id in named.items() if found is not None}

  def split(self, text: str) -> Iterator[tuple[str, int | None]]:
    """Yields (text, the control token behind it); the last has none."""
    start = 0
    found = self._finder.encode(text, add_special_tokens=False)
    for token, (begin, end) in zip(found.ids, found.offsets):
      if token in self._controls:
        yield text[start:begin], self._controls[token]
        start = end
    yield text[start:], None
