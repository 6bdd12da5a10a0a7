"""Test cases of programming problems as data sets have them, read and written as the program of a graded run.

    ["assert add(2, 3) == 5", ...]                                      MBPP's test_list
    {"inputs": ["2 3\\n", ...], "outputs": ["5\\n", ...]}                 standard input and output, as TACO and APPS
    {"fn_name": "add", "inputs": [[2, 3], ...], "outputs": [5, ...]}    the same, for a function
    [{"input": "2 3\\n", "output": "5\\n"}, ...]                          LiveCodeBench

Each may be the JSON text of it, too.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import json
import pathlib
import textwrap
from typing import Any, Literal

from sao_jax.errors import ConfigError
from sao_jax.sandbox import case_runner

REMEDY = "Name the field with the tests of a problem; its forms stand in sao_jax/sandbox/program_cases.py."


@dataclasses.dataclass(frozen=True)
class ProgramCases:
  """The cases of one problem.

  Attributes:
    kind: statements that assert, calls of a function, or runs of the program.
    cases: statements, or pairs of input and output.
    setup: statements before each case, imports for example.
    names: the functions of the program that are called.
  """

  kind: Literal["asserts", "calls", "programs"]
  cases: tuple[Any, ...]
  setup: str = ""
  names: tuple[str, ...] = ()

  def __len__(self) -> int:
    return len(self.cases)

  def first(self, most: int) -> ProgramCases:
    """Returns the first cases, at most so many."""
    return dataclasses.replace(self, cases=self.cases[:most])

  def program(self, case_timeout: float, timeout: float) -> str:
    """Writes the hidden tests for `graded_run`; their last line says how many have passed, see `Cases.report`."""
    # The cases enter as literals: nothing of them is read from a file.
    if self.kind == "asserts":
      run = self._asserts()
    elif self.kind == "calls":
      run = f"tested.run_calls({self.names[0]!r}, {self.cases!r})"
    else:
      run = f"tested.run_programs({self.cases!r})"
    begin = f"tested = Cases(program, {case_timeout!r}, {timeout!r})"
    return f"{_runner()}\n{begin}\n{run}\ntested.report()\n"

  def _asserts(self) -> str:
    """Writes the statements as functions, within one whose names hide none of the runner's."""
    lines = [f"def hidden(_tested, {', '.join(self.names)}):", "  try:", _indented(self.setup or "pass")]
    lines += ["  except Exception as error:", "    return _tested.broken(error)"]
    for number, case in enumerate(self.cases):
      lines += [f"  def _case_{number}():", _indented(case), f"  _tested.count(_case_{number})"]
    functions = ", ".join(f"tested.function({name!r})" for name in self.names)
    return "\n".join([*lines, f"hidden(tested, {functions})"])


def read_cases(gold: Any, field: str = "gold") -> ProgramCases:
  """Reads the tests of one problem.

  Raises:
    ConfigError: naming `field`, for what is none of the forms, or has no case.
  """
  if isinstance(gold, str):
    try:
      gold = json.loads(gold)
    except ValueError as error:
      raise _refused(field, gold, "is no JSON") from error
  try:
    cases = _read(gold)
  except (TypeError, ValueError, KeyError, SyntaxError, RecursionError) as error:
    raise _refused(field, gold, f"holds no tests ({type(error).__name__}: {error})") from error
  if not len(cases):
    raise _refused(field, gold, "has no case")
  return cases


def _read(gold: Any) -> ProgramCases:
  # MBPP, whole records of it.
  if isinstance(gold, dict) and "test_list" in gold:
    imports = [*(gold.get("test_imports") or ()), gold.get("test_setup_code") or ""]
    return _asserts(gold["test_list"], "\n".join(imports))

  # TACO and APPS: programs, or a function by its name.
  if isinstance(gold, dict):
    pairs = tuple(zip(gold["inputs"], gold["outputs"], strict=True))
    function = gold.get("fn_name") or gold.get("func_name")
    if not function:
      return ProgramCases("programs", tuple((_lines(given), _lines(wanted)) for given, wanted in pairs))
    if not str(function).isidentifier():
      raise ValueError(f"{function!r} is no function")
    return ProgramCases("calls", tuple((list(given), wanted) for given, wanted in pairs), names=(function,))

  # LiveCodeBench, whose tests of functions have their name elsewhere; else statements.
  if gold and all(isinstance(case, dict) for case in gold):
    if any(case.get("testtype", "stdin") != "stdin" for case in gold):
      raise ValueError("tests of functions need fn_name")
    return ProgramCases("programs", tuple((_lines(case["input"]), _lines(case["output"])) for case in gold))
  return _asserts(gold, "")


def _asserts(statements: Any, setup: str) -> ProgramCases:
  """Reads statements; names that nothing defines are the program's."""
  if not isinstance(statements, list | tuple) or not all(isinstance(each, str) for each in statements):
    raise TypeError("no list of statements")

  # Names that are bound anywhere, and those that the cases read.
  bound, loaded = set(dir(builtins)), set()
  for number, text in enumerate((setup, *statements)):
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        bound.add(node.id)
      elif isinstance(node, ast.Name) and number:
        loaded.add(node.id)
      elif isinstance(node, ast.alias):
        bound.add((node.asname or node.name).partition(".")[0])
      elif isinstance(node, ast.arg):
        bound.add(node.arg)
      elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        bound.add(node.name)

  # Without a name that is left over, nothing of the program would be tested.
  if statements and not loaded - bound:
    raise ValueError("they call nothing of the program's")
  return ProgramCases("asserts", tuple(statements), setup, tuple(sorted(loaded - bound)))


def _indented(text: str) -> str:
  return textwrap.indent(ast.unparse(ast.parse(text)) or "pass", "    ")


def _lines(text: Any) -> str:
  if isinstance(text, list) and all(isinstance(each, str) for each in text):
    return "\n".join(text)
  if not isinstance(text, str):
    raise TypeError(f"{text!r:.40} is no text")
  return text


def _refused(field: str, gold: Any, problem: str) -> ConfigError:
  return ConfigError(field, f"{gold!r:.80} {problem}.", REMEDY)


@functools.cache
def _runner() -> str:
  return pathlib.Path(case_runner.__file__).read_text(encoding="utf-8")
