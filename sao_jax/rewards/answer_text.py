r"""The answer within what a policy said: the last box, or all that stands behind its thinking. Linear in the text.

A policy thinks between `<think>` and `</think>`; where a chat template has opened the thinking in the prompt, only the
closing marker is said. A box is `\boxed{...}` or `\fbox{...}`, with its braces balanced.
"""

from __future__ import annotations

import re

OPEN_THINKING, CLOSE_THINKING = "<think>", "</think>"
TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace is text, not a brace


def without_thinking(said: str) -> str | None:
  """Returns what stands behind the thinking; None when it has not ended.

  >>> without_thinking("<think>perhaps 3</think>It is 4."), without_thinking("<think>perhaps 3")
  ('It is 4.', None)
  """
  spoken = said.rpartition(CLOSE_THINKING)[2]
  return None if OPEN_THINKING in spoken else spoken


def last_box(text: str) -> str | None:
  r"""Returns the content of the box that ends last, nested braces whole; None without a box that ends.

  >>> last_box(r"\boxed{3}, no: \boxed{\frac{1}{2}}")
  '\\frac{1}{2}'
  """
  opened: list[int | None] = []  # where the content of each open box begins; None for other braces
  box: tuple[int, int] | None = None
  for token in TOKEN.finditer(text):
    if token.group() == "}":
      begin = opened.pop() if opened else None
      box = box if begin is None else (begin, token.start())
    elif token.group().endswith("{") and token.group() != r"\{":
      opened.append(token.end() if token.group() != "{" else None)
  return None if box is None else text[slice(*box)]


def boxed_answer(said: str) -> str | None:
  """Returns the last box behind the thinking; None: no answer was given."""
  spoken = without_thinking(said)
  return None if spoken is None else last_box(spoken)


def spoken_answer(said: str) -> str | None:
  """Returns the last box behind the thinking, or without any the whole text there, blanks around it removed."""
  spoken = without_thinking(said)
  if spoken is None:
    return None
  box = last_box(spoken)
  return (spoken if box is None else box).strip()
