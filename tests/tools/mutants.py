"""Mutants: plausible one-line faults of a source file, found in its syntax tree and put into its text.

Left alone are annotations, decorators, docstrings, and what only makes a message: `raise`, `assert` and logging.
"""

from __future__ import annotations

import ast
import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence

COMPARISONS = {
  ast.Lt: ast.LtE,
  ast.LtE: ast.Lt,
  ast.Gt: ast.GtE,
  ast.GtE: ast.Gt,
  ast.Eq: ast.NotEq,
  ast.NotEq: ast.Eq,
  ast.Is: ast.IsNot,
  ast.IsNot: ast.Is,
  ast.In: ast.NotIn,
  ast.NotIn: ast.In,
}
OPERATORS = {
  ast.Add: ast.Sub,
  ast.Sub: ast.Add,
  ast.Mult: ast.Div,
  ast.Div: ast.Mult,
  ast.FloorDiv: ast.Mult,
  ast.Mod: ast.Mult,
  ast.BitAnd: ast.BitOr,
  ast.BitOr: ast.BitAnd,
}
NAMES = {"min": "max", "minimum": "maximum", "any": "all", "floor": "ceil", "zeros": "ones", "append": "appendleft"}
NAMES |= {new: old for old, new in NAMES.items() if old != "append"}
MESSAGES = ("log", "logging", "logger", "warnings")


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One fault.

  Attributes:
    file: path below the package.
    line: of the fault, from 1.
    kind: of the fault, in a word.
    start: offset of what is replaced, in the file's UTF-8 bytes.
    old: what is replaced.
    new: what stands there instead.
  """

  file: str
  line: int
  kind: str
  start: int
  old: str
  new: str

  @property
  def name(self) -> str:
    """What identifies it in a version of the code."""
    return f"{self.file}:{self.line} {self.kind}@{self.start}: {_short(self.old)} -> {_short(self.new)}"

  @property
  def room(self) -> str:
    """The folder of its file."""
    return self.file.partition("/")[0]

  def apply(self, source: str) -> str:
    """The source with the fault in it."""
    data, old = source.encode(), self.old.encode()
    if data[self.start : self.start + len(old)] != old:
      raise ValueError(f"{self.name} does not belong to this version of the file")
    return (data[: self.start] + self.new.encode() + data[self.start + len(old) :]).decode()


def find(file: str, source: str) -> list[Mutant]:
  """All mutants of a file, in the order of their places."""
  data, lines = source.encode(), [0]
  for line in source.encode().splitlines(keepends=True):
    lines.append(lines[-1] + len(line))

  found = []
  for node, kind, new in _faults(ast.parse(source)):
    start, end = lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset
    old = data[start:end].decode()
    text = new if isinstance(new, str) else f"({ast.unparse(new)})" if isinstance(node, ast.expr) else ast.unparse(new)
    if text != old:
      found.append(Mutant(file, node.lineno, kind, start, old, text))
  return sorted(found, key=lambda mutant: (mutant.start, mutant.kind, mutant.new))


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
  """Chooses `count` of them, from the rooms in turn; the same ones for the same seed, and the first ones for fewer."""
  rooms: Mapping[str, list[Mutant]] = {}
  for mutant in mutants:
    rooms.setdefault(mutant.room, []).append(mutant)
  for name, members in sorted(rooms.items()):
    random.Random(f"{seed} {name}").shuffle(members)

  chosen: list[Mutant] = []
  while len(chosen) < min(count, len(mutants)):
    for _, members in sorted(rooms.items()):
      if members and len(chosen) < count:
        chosen.append(members.pop())
  return chosen


def _short(text: str) -> str:
  text = " ".join(text.split())
  return text if len(text) <= 60 else f"{text[:40]}...{text[-17:]}"


def _faults(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, ast.AST | str]]:
  """Yields (node, kind, what replaces it) for every fault."""
  for node in _code(tree):
    match node:
      case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
        yield node, "comparison", _with(node, ops=[COMPARISONS[type(operator)]()])
      case ast.BoolOp():
        yield node, "boolean", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
      case ast.BinOp() if type(node.op) in OPERATORS and not _is_text(node):
        yield node, "arithmetic", _with(node, op=OPERATORS[type(node.op)]())
      case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
        yield node, "negation", node.operand
      case ast.IfExp():
        yield node, "branches", _with(node, body=node.orelse, orelse=node.body)
      case ast.Constant(value=bool()):
        yield node, "constant", str(not node.value)
      case ast.Constant(value=int() | float()):
        yield node, "constant", repr(node.value + 1)
      case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
        yield node, "statement", "pass"
      case ast.If() if not node.orelse and len(node.body) == 1 and isinstance(node.body[0], ast.Return | ast.Continue):
        yield node, "guard", "pass"
      case ast.Call():
        yield from _calls(node)


def _calls(node: ast.Call) -> Iterator[tuple[ast.expr, str, ast.AST | str]]:
  """Yields faults of a call: another function, arguments swapped, one left out."""
  name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
  if name in NAMES:
    func = _with(node.func, **{"attr" if isinstance(node.func, ast.Attribute) else "id": NAMES[name]})
    yield node.func, "function", ast.unparse(func)
  if len(node.args) >= 2 and not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
    first, second, *rest = node.args
    yield node, "swapped", _with(node, args=[second, first, *rest])
  for index, keyword in enumerate(node.keywords):
    if keyword.arg is not None:
      yield node, "left out", _with(node, keywords=node.keywords[:index] + node.keywords[index + 1 :])


def _with(node: ast.AST, **fields: object) -> ast.AST:
  """A copy with other fields."""
  return type(node)(**{name: getattr(node, name, None) for name in node._fields} | fields)


def _is_text(node: ast.BinOp) -> bool:
  """Whether it joins or formats strings."""
  sides = (node.left, node.right)
  return any(isinstance(each, ast.JoinedStr) or isinstance(getattr(each, "value", None), str) for each in sides)


def _code(node: ast.AST) -> Iterator[ast.AST]:
  """Yields the nodes below that compute something."""
  skipped = {"annotation", "returns", "decorator_list", "bases", "type_comment"}
  for name, value in ast.iter_fields(node):
    for child in value if isinstance(value, list) else [value]:
      if not isinstance(child, ast.AST) or name in skipped or _is_message(child):
        continue
      yield child
      yield from _code(child)


def _is_message(node: ast.AST) -> bool:
  """Whether a statement or expression only says something."""
  if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
    return True
  function = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
  return isinstance(function, ast.Attribute) and getattr(function.value, "id", "") in MESSAGES
