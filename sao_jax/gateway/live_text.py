"""Text from tokens as they are sampled: no half character, and an end where a stop text begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MARK = "\ufffd"  # for bytes that are no character, or only the beginning of one
LONGEST = 3  # bytes of a character that still lacks its last one, and so the most tokens to hold back


class LiveText:
  """Decodes tokens piece by piece. Joined, the pieces are the text of all tokens; the end of a character is awaited.

  It is for tokenizers on bytes, whose tokens can be decoded apart; the tokenizers of this project are.

  >>> live = LiveText(lambda ids: bytes(ids).decode(errors="replace"))
  >>> [live.take(ids) for ids in ([104, 195], [182], [33])]
  ['h', 'ö', '!']
  """

  def __init__(self, decode: Callable[[list[int]], str]):
    """Begins without a token; `decode` is the tokenizer's."""
    self._decode, self._waiting = decode, []

  def take(self, token_ids: Sequence[int]) -> str:
    """Takes further tokens; returns the text that is complete now."""
    self._waiting += [int(token) for token in token_ids]
    for held in range(min(LONGEST, len(self._waiting)) + 1):
      ready = self._waiting[: len(self._waiting) - held]
      text = self._decode(ready) if ready else ""
      if not text.endswith(MARK) or held == LONGEST:  # bytes that nothing can complete are not waited for
        self._waiting = self._waiting[len(ready) :]
        return text
    return ""

  def end(self) -> str:
    """Returns the rest: bytes that stayed incomplete."""
    rest, self._waiting = self._waiting, []
    return self._decode(rest) if rest else ""


class StopSearch:
  """Looks for the first of several texts in a text that comes in pieces, across their borders too.

  >>> search = StopSearch(("END",))
  >>> search.take("a E"), search.take("N"), search.take("D b"), search.found
  ('a ', '', '', True)
  """

  def __init__(self, stop: Sequence[str]):
    """Begins with an empty text; without stop texts everything passes."""
    self._stop, self._held = tuple(stop), ""
    self.found = False

  def take(self, text: str) -> str:
    """Takes a further piece; returns what stands surely before any stop text."""
    if self.found:
      return ""
    self._held += text
    places = [place for place in map(self._held.find, self._stop) if place >= 0]
    if places:
      self.found, place = True, min(places)
    else:
      place = len(self._held) - longest_beginning(self._held, self._stop)
    ready, self._held = self._held[:place], self._held[place:]
    return ready

  def end(self) -> str:
    """Returns what was held back, once nothing follows any more."""
    rest, self._held = ("" if self.found else self._held), ""
    return rest


def longest_beginning(text: str, words: Sequence[str]) -> int:
  """Returns the length of the longest end of `text` that is a true beginning of one of the words."""
  longest = max(map(len, words), default=0)
  lengths = range(min(longest - 1, len(text)), 0, -1)
  return next((n for n in lengths if any(word.startswith(text[-n:]) for word in words)), 0)
