r"""Normalises the text of a mathematical answer to the LaTeX that math-verify reads, and finds answers that are words.

Ours, because math-verify reads letters in LaTeX as variables (`pi` is p times i, `1.5e3` a multiple of Euler's number):
plain functions and constants, `**`, e-notation, blanks as thousands separators, mixed numbers with a blank, periodic
decimals, signs in a row, units without `\text`, a full stop at the end, `3 = x`.
"""

from __future__ import annotations

import re

FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
UNIT = (
  r"(?:km|cm|mm|m|kg|mg|g|ms|s|sec|seconds?|min|minutes?|h|hours?|days?|weeks?|years?|meters?|metres?|miles?|mph|ft|"
  r"feet|inch(?:es)?|liters?|litres?|ml|l|dollars?|cents?|euros?|units?|degrees?)"
)
VARIABLES = r"(?:mg?|ms|[gshl])"  # units only behind a blank: 2m may be a product
CHARACTERS = str.maketrans(
  dict(zip("−–\u00a0\u202f~÷", "--   /", strict=True))
  | {"×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "±": r"\pm "}
  | {"≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "∅": r"\emptyset "}
)
NUMBER = r"-?\d+(?:\.\d+)?"
REWRITES = [
  (re.compile(pattern), replacement)
  for pattern, replacement in (
    (r"\\(?:displaystyle|left|right|!)(?![A-Za-z])", ""),
    (r"(?<!\\)\\[,;: ]", " "),
    (r"(?<=\d)i(?![A-Za-z])", " i"),  # 2i; a product with i is complex only when i stands alone
    (r"\.\s*$", ""),  # of a sentence
    (r"\\(?:text|textbf|mathrm|mathbf)\s*\{\s*(-?[\d.,]+)\s*\}", r"\1"),  # \text{12}
    (r"(?<![\d,.])(\d{1,3})((?: \d{3})+)(?![\d.])", lambda match: match[0].replace(" ", "")),  # 1 000 000
    (r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,6})(?![\w.])", r"{(\1\\cdot 10^{\2})}"),  # 1.5e3
    (r"^(\s*-?\d+)\s+(\d+)\s*/\s*(\d+)\s*$", r"\1\\frac{\2}{\3}"),  # 2 1/2
    (r"\*\*\s*\(([^()]*)\)", r"^{\1}"),
    (r"(?:\*\*|\^)\s*(-?\d+)", r"^{\1}"),  # 2**10; LaTeX reads 2^10 as 2^1 0
    (r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (rf"(?<![A-Za-z\\])({FUNCTIONS})(?=\s*\(|\s+(?:\d|[A-Za-z](?![A-Za-z])))", r"\\\1"),  # and ln 2
    (r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
    (r"(?<!\*)\*(?!\*)", r"\\cdot "),
    (r"\+\s*-", "-"),
    (r"-\s*-", "+"),
    (rf"^(\s*{NUMBER})\s*=\s*([A-Za-z])\s*$", r"\2 = \1"),  # 3 = x
    (rf"^\s*({NUMBER})({VARIABLES})\s*$", r"\2\\cdot (\1)"),
    (rf"^(\s*{NUMBER})\s*{UNIT}(?:\^?\{{?[23]\}}?)?(?:\s*/\s*{UNIT})?\s*$", r"\1"),  # 5 km/h
    (r"(-?)(\d*)\.(\d*)\\overline\{(\d+)\}", lambda match: _periodic(*match.groups())),
  )
]
MARKS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|boxed)\s*\{([^{}]*)\}")
WORDS = re.compile(r"[^\W\d_]+(?:[ '’-][^\W_]+)*")  # a number may follow, as in a date
CHOICE = re.compile(r"[A-J]")


def to_latex(text: str) -> str:
  r"""Rewrites an answer to LaTeX without surrounding dollars; text that is LaTeX already stays.

  >>> to_latex("-2*pi + -1.5e3"), to_latex("2**10"), to_latex("1 000")
  ('-2\\cdot \\pi  -{(1.5\\cdot 10^{3})}', '2^{10}', '1000')
  """
  text = text.strip()
  for opened, closed in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
    if text.startswith(opened) and text.endswith(closed) and len(text) > len(opened + closed):
      text = text[len(opened) : -len(closed)].strip()
  text = text.translate(CHARACTERS)
  for pattern, replacement in REWRITES:
    text = pattern.sub(replacement, text)
  return text.strip()


def words_of(text: str) -> str | None:
  r"""Returns an answer that is nothing but words, in lower case; None for any other.

  >>> words_of(r"\textbf{(C)}"), words_of(r"\text{Van  Buren}."), words_of("x+1")
  ('c', 'van buren', None)
  """
  for _ in range(3):  # marks in one another
    text = MARKS.sub(r"\1", text.strip().strip("$"))
  text = " ".join(text.strip(" .").split())
  if text.startswith("(") and text.endswith(")"):
    text = text[1:-1].strip()
  return text.casefold() if WORDS.fullmatch(text) else None


def bracket_depth(text: str) -> int:
  r"""Counts the brackets in one another, of any kind and closed or not; a command such as \frac adds nothing.

  >>> bracket_depth(r"\frac{1}{(2)}"), bracket_depth("[0, 1)")
  (2, 1)
  """
  depth = deepest = 0
  for character in text:
    depth += (character in "([{") - (character in ")]}")
    deepest = max(deepest, depth)
  return deepest


def is_text(gold: str) -> bool:
  r"""True when a right answer means its words, not a product of variables: a choice A to J, `\text{...}`, a long word.

  >>> is_text("C"), is_text(r"\text{no}"), is_text("Evelyn"), is_text("ab"), is_text("x")
  (True, True, True, False, False)
  """
  words = words_of(gold)
  if words is None:
    return False
  bare = gold.strip().strip("$").strip("(). ")
  return bool(CHOICE.fullmatch(bare)) or bare.startswith("\\") or (len(words) > 3 and not re.search(r"\d", words))


def _periodic(sign: str, whole: str, fixed: str, period: str) -> str:
  """Writes a periodic decimal as a fraction: 0.1(6) is (16 - 1) / 90."""
  numerator = whole + fixed
  denominator = "9" * len(period) + "0" * len(fixed)
  return rf"{sign}\frac{{{int(numerator + period) - int(numerator or '0')}}}{{{denominator}}}"
