"""Controls of hidden tests: copies that must fail. Whoever makes tests pass wholesale makes their controls pass, too.

A control differs from its test in one assertion: another expected value, the opposite, or one more that is false.

    assert add(2, 3) == 5    assert add(2, 3) == 4071
    assert add(2, 3) < 6     assert not (add(2, 3) < 6)
    (none of its own)        ...; assert not True

Files of tests are parsed, and edited where the assertion stands; they are never run here.
"""

from __future__ import annotations

import ast
import dataclasses
import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Session:
  """The files and tests of one run of a repository's tests.

  Attributes:
    files: path -> text.
    originals: ids of tests that stand in the files as they were written.
    controls: ids of tests that must not pass.
  """

  files: dict[str, str]
  originals: frozenset[str]
  controls: frozenset[str]


def split_tests(files: Mapping[str, str], ids: Collection[str], rng: random.Random) -> tuple[Session, Session]:
  """Divides tests at random over two sessions: each is a test in one of them, and a control in the other.

  One more control stands at the end of every file. Tests that are not found in the text, as inherited ones, are tests
  in both.

  Args:
    files: path -> text of the files with the tests.
    ids: pytest's node ids, `path::Class::function[parameters]`.
    rng: divides.
  """
  # A coin for each function.
  first: dict[str, set[str]] = {}  # path -> names of functions that are controls in the first session
  known = {path: {name for name, _ in functions_of(text)} for path, text in files.items()}
  for path, names in known.items():
    first[path] = {name for name in sorted(names) if rng.random() < 0.5}

  # The second session has the others.
  sessions = []
  for chosen in (first, {path: known[path] - names for path, names in first.items()}):
    controls = {test for test in ids if name_of(test) in chosen.get(path_of(test), ())}
    edited, added = {}, set()
    for path, text in files.items():
      word = f"test_{rng.getrandbits(40):010x}"
      edited[path] = f"{_with_controls(text, chosen[path], rng)}\n\ndef {word}():\n  assert not True\n"
      added.add(f"{path}::{word}")
    sessions.append(Session(edited, frozenset(set(ids) - controls), frozenset(controls | added)))
  return sessions[0], sessions[1]


def path_of(test: str) -> str:
  """Returns the file of a test."""
  return test.partition("::")[0]


def name_of(test: str) -> str:
  """Returns the name of a test in its file, `Class::function`, without parameters."""
  return test.partition("::")[2].partition("[")[0]


def functions_of(text: str) -> Iterator[tuple[str, Function]]:
  """Finds the functions of a file and its classes, by their names; of two with one name the last one, which counts."""
  try:
    tree = ast.parse(text)
  except (SyntaxError, ValueError, RecursionError):
    return
  found: dict[str, Function] = {}

  # Methods have the name of their class before their own.
  def visit(body: list[ast.stmt], before: str) -> None:
    for node in body:
      if isinstance(node, Function):
        found[before + node.name] = node
      elif isinstance(node, ast.ClassDef):
        visit(node.body, f"{before}{node.name}::")

  visit(tree.body, "")
  yield from found.items()


def _with_controls(text: str, names: Collection[str], rng: random.Random) -> str:
  """Edits the functions of these names into controls, the last one first, so that places stay where they are."""
  lines = text.encode("utf-8").splitlines(keepends=True)
  chosen = [function for name, function in functions_of(text) if name in names]
  for function in sorted(chosen, key=lambda function: function.lineno, reverse=True):
    asserts = [node for node in function.body if isinstance(node, ast.Assert)]
    last = asserts[-1] if asserts else function.body[-1]
    begin, end = (last.lineno - 1, last.col_offset), (last.end_lineno - 1, last.end_col_offset)

    # A further assertion has a line of its own, unless the statement shares one, as in `def test(): check()`.
    indent = lines[begin[0]][: begin[1]]
    gap = b"; " if indent.strip() else b"\n" + indent
    if asserts:
      new = ast.unparse(ast.Assert(_falsified(last.test, rng), None)).encode("utf-8")
    elif isinstance(last, ast.Return):
      new, end = b"assert not True" + gap, begin
    else:
      new, begin = gap + b"assert not True", end
    # Lines outside of the statement stay as they are.
    before, behind = lines[begin[0]][: begin[1]], lines[end[0]][end[1] :]
    lines[begin[0] : end[0] + 1] = [before + new + behind]
  return b"".join(lines).decode("utf-8")


def _falsified(test: ast.expr, rng: random.Random) -> ast.expr:
  """Makes a condition false that was true: its literal becomes another one, or it is turned around."""
  if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
    left, right = test.left, test.comparators[0]
    for literal, other in ((right, left), (left, right)):
      try:
        value = ast.literal_eval(literal)
      except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        continue
      return ast.Compare(other, [ast.Eq()], [ast.parse(repr(_another(value, rng)), mode="eval").body])
  return ast.UnaryOp(ast.Not(), test)


def _another(value: Any, rng: random.Random) -> Any:
  """Returns a value of the same kind that is practically never right."""
  number = rng.randrange(1000, 10**6)
  if isinstance(value, bool):
    return not value
  if isinstance(value, int | float | complex):
    return -value - number  # a sum with a large float would be that float
  if isinstance(value, str):
    return f"{value}{number}"
  if isinstance(value, bytes):
    return value + str(number).encode("ascii")
  if isinstance(value, list | tuple):
    return [*value, number] if isinstance(value, list) else (*value, number)
  return {**value, number: number} if isinstance(value, dict) else number
