"""The page has air: comments and blank lines in long bodies, docstrings that begin with a verb or a noun.

The codebases that this one was compared with (rlax, mctx, nanodo, big_vision) have 10 to 17 % and 9 to 16 %.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize

from toys.paths import REPOSITORY

LONG = 15  # lines of a function's body, its docstring left out
COMMENTS, BLANK = 0.08, 0.08  # least shares of the lines of long bodies
QUESTION = re.compile(r"(What|Which|Whether|Where|How)\b")


def python_files():
  return sorted([*(REPOSITORY / "sao_jax").rglob("*.py"), *(REPOSITORY / "launch").glob("*.py")])


def comment_lines(source: str) -> set[int]:
  """Numbers of the lines that hold a comment, beside code or alone."""
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}


def long_bodies(source: str):
  """(name, first line, last line) of each function's body of `LONG` lines and more, without its docstring."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      first = node.body[0].end_lineno + 1 if ast.get_docstring(node) else node.body[0].lineno
      if node.end_lineno - first + 1 >= LONG:
        yield node.name, first, node.end_lineno


def shares(sources: list[str]) -> tuple[float, float]:
  """Shares of lines with a comment and of blank lines, over the long bodies of all sources together."""
  lines = comments = blank = 0
  for source in sources:
    text, commented = source.split("\n"), comment_lines(source)
    for _, first, last in long_bodies(source):
      numbers = range(first, last + 1)
      lines += len(numbers)
      comments += sum(number in commented for number in numbers)
      blank += sum(not text[number - 1].strip() for number in numbers)
  return comments / lines, blank / lines


def questions(source: str) -> list[str]:
  """The first lines of docstrings that begin as a question does."""
  documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
  return [text.splitlines()[0] for text in texts if QUESTION.match(text)]


def test_long_bodies_have_signposts_and_blank_lines():
  comments, blank = shares([path.read_text(encoding="utf-8") for path in python_files()])
  assert comments >= COMMENTS and blank >= BLANK, f"comments {comments:.1%}, blank {blank:.1%}"


def test_docstrings_begin_with_a_verb_or_a_noun():
  found = {path: questions(path.read_text(encoding="utf-8")) for path in python_files()}
  assert not any(found.values()), "\n".join(f"{path}: {line}" for path, lines in found.items() for line in lines)


def test_what_is_counted():
  body = "\n".join(["  # Why.", "  x = 1  # beside it", '  y = "# none"', "", *["  x += 1"] * (LONG - 4)])
  source = f'def f():\n  """How it is.\n\n  # Not a comment.\n  """\n{body}\n\n\ndef g():\n  return 1  # short\n'
  ((name, first, last),) = long_bodies(source)
  assert (name, last - first + 1) == ("f", LONG)
  assert shares([source]) == (2 / LONG, 1 / LONG)
  assert questions(source) == ["How it is."]
  assert questions('class Whichever:\n  """Whichever comes first."""\n') == []
