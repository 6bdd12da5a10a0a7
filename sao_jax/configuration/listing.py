"""Configurations as text for a terminal: every field with its value, type, bounds and the comment behind it."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any

from sao_jax.configuration import config_tree
from sao_jax.configuration.field_values import describe

WIDTH = 100  # characters of a line
_TYPE_COLUMN = 56


def listing(config: Any, unchanged: Any = None) -> str:
  """Lists all fields of a configuration in two lines each: name, value and type; then the comment in its source.

  Args:
    config: a frozen dataclass of values and of other such dataclasses.
    unchanged: another of the same kind; fields that differ are marked with a star, and say what they were.
  """
  values = {} if unchanged is None else {path: value for path, value, _ in config_tree.leaves(unchanged)}
  return "\n".join(_section(config, "", values)) + "\n"


def comments(class_: type) -> dict[str, str]:
  """Reads the comments behind the fields of a dataclass from its source; none where there is no source."""
  found = {}
  for base in reversed(class_.__mro__):
    try:
      source = textwrap.dedent(inspect.getsource(base))
    except (OSError, TypeError):  # built in, or made in an interactive session
      continue
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    fields = (node for node in ast.parse(source).body[0].body if isinstance(node, ast.AnnAssign))
    found |= {node.target.id: by_line.get(node.end_lineno, "") for node in fields}
  return found


def _section(section: Any, prefix: str, unchanged: dict[str, Any]) -> Iterator[str]:
  """The lines of a section: its own fields first, then the sections within it."""
  remarks, annotations = comments(type(section)), config_tree.annotations(section)
  if prefix:
    purpose = (inspect.getdoc(type(section)) or "").partition("\n")[0]
    yield from ("", *textwrap.wrap(f"{prefix[:-1]}: {purpose}", WIDTH, subsequent_indent="  "))
  nested = {name: config_tree.sections_at(f"{prefix}{name}", getattr(section, name)) for name in annotations}
  for name in annotations:
    if nested[name]:
      continue
    path, value = f"{prefix}{name}", getattr(section, name)
    changed = unchanged.get(path, value) != value
    mark, was = ("*", f"was {unchanged[path]!r}") if changed else (" ", "")
    yield from _field(f"{mark} {path} = {value!r}", describe(annotations[name]), was, remarks.get(name, ""))
  for path, inner in (each for found in nested.values() for each in found.items()):
    yield from _section(inner, f"{path}.", unchanged)


def _field(assignment: str, kind: str, *remarks: str) -> Iterator[str]:
  indent = " " * 6
  line = f"{assignment.ljust(_TYPE_COLUMN)} {kind}"
  if len(line) <= WIDTH:
    yield line
  else:
    yield from textwrap.wrap(assignment, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    yield f"{' ' * _TYPE_COLUMN} {kind}" if _TYPE_COLUMN + len(kind) < WIDTH else indent + kind
  for remark in filter(None, remarks):
    yield from textwrap.wrap(remark, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
