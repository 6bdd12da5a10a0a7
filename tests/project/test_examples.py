"""Every `>>>` example in the docstrings of the package works, and prints exactly what the docstring says."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import pathlib

import pytest
from toys import chat_toy, tfds_toy
from toys.paths import REPOSITORY

PACKAGE = REPOSITORY / "sao_jax"

# Folders that examples take as given, by the name they use: what is in it, written below a new folder.
GIVEN = {"folder": chat_toy.save_folder, "data_dir": tfds_toy.prepare}
# In an expected result, "..." stands for any text, such as the last digits of a number.
RUNNER = functools.partial(doctest.DocTestRunner, verbose=False, optionflags=doctest.ELLIPSIS)


def find_examples(path: pathlib.Path) -> list[tuple[str, str, int]]:
  """(name, docstring, line) of every docstring with an example; read from the text, so that no decorator hides one."""
  tree = ast.parse(path.read_text(encoding="utf-8"))
  found = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
      docstring = ast.get_docstring(node)
      if docstring and ">>>" in docstring:
        found.append((getattr(node, "name", path.stem), docstring, node.body[0].lineno - 1))
  return found


EXAMPLES = [
  pytest.param(path, *example, id=f"{path.relative_to(PACKAGE).with_suffix('')}.{example[0]}")
  for path in sorted(PACKAGE.rglob("*.py"))
  for example in find_examples(path)
]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
  """Makes a given folder once."""
  made: dict[str, str] = {}

  def make(name: str) -> str:
    if name not in made:
      made[name] = str(GIVEN[name](tmp_path_factory.mktemp(name)))
    return made[name]

  return make


@pytest.mark.parametrize("path, name, docstring, line", EXAMPLES)
def test_example(path, name, docstring, line, given):
  module = importlib.import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
  test = doctest.DocTestParser().get_doctest(docstring, vars(module).copy(), name, str(path), line)
  words = set(ast_names(test))
  test.globs |= {folder: given(folder) for folder in GIVEN if folder in words}
  assert test.examples and not any(doctest.SKIP in example.options for example in test.examples)
  report: list[str] = []
  failed, attempted = RUNNER().run(test, out=report.append)
  assert not failed, "".join(report)
  assert attempted == len(test.examples)


def ast_names(test: doctest.DocTest) -> list[str]:
  """Names that the examples read."""
  trees = [ast.parse(example.source) for example in test.examples]
  return [node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)]


def test_an_example_that_is_wrong_would_fail(tmp_path):
  path = tmp_path / "module.py"
  path.write_text('def f():\n  """Adds.\n\n  >>> 1 + 1\n  3\n  """\n', encoding="utf-8")
  ((name, docstring, line),) = find_examples(path)
  test = doctest.DocTestParser().get_doctest(docstring, {}, name, str(path), line)
  assert RUNNER().run(test, out=lambda text: None).failed == 1
