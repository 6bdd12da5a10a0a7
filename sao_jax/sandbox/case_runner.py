"""Hidden test cases of a program, as a script inside a sandbox: the text of this file stands in a graded run.

The program under test, solution.py, runs in a process of its own for every call; what it returns comes back as a Python
literal, so that neither its objects nor its patches reach the cases. Nothing else is imported here: it is not installed
there, and `tests_prelude` stands before it.
"""

import ast
import os
import sys
import time

SOLUTION = "solution.py"
# One call in a process of its own. A value is written as a literal of plain types, whatever subclass it is of.
CALLED = """
import ast, importlib, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
function, arguments, named = ast.literal_eval(sys.stdin.read())
sys.path.insert(0, os.getcwd())
sys.dont_write_bytecode, sys.pycache_prefix = True, "/nowhere"
def literal(value):
  if value is None: return "None"
  if isinstance(value, float): return repr(float(value)).replace("inf", "1e999")
  for kind in (bool, int, complex, str, bytes):
    if isinstance(value, kind): return repr(kind(value))
  if isinstance(value, tuple): return "(" + "".join(literal(each) + "," for each in value) + ")"
  if isinstance(value, list): return "[" + ",".join(map(literal, value)) + "]"
  if isinstance(value, (set, frozenset)): return "{" + ",".join(map(literal, value)) + "}" if value else "set()"
  if isinstance(value, dict): return "{" + ",".join(literal(k) + ":" + literal(v) for k, v in value.items()) + "}"
  raise TypeError(type(value))
module = importlib.import_module("solution")
if not hasattr(module, function) and hasattr(module, "Solution"): module = module.Solution()
answers.write(literal(getattr(module, function)(*arguments, **named)))
answers.flush()
os._exit(0)
"""


class Unsupported(Exception):
  """A case that cannot be run: a fault of the data, and none of the program."""


class Cases:
  """Runs cases one after the other, within a time for all of them.

  Attributes:
    passed: how many have passed.
    unsupported: the first problem with the data; "" without one.
  """

  def __init__(self, program, case_timeout, timeout):
    """`program` is that of `tests_prelude`; the times are seconds for each call, and for all together."""
    self.passed, self.unsupported, self._answered = 0, "", False
    self._program, self._case_timeout, self._ends = program, case_timeout, time.monotonic() + timeout

  def call(self, function, arguments, named):
    """Calls a function of the program, or a method of its class Solution."""
    text = repr((function, arguments, named))
    try:
      same = ast.literal_eval(text) == (function, arguments, named)
    except (ValueError, SyntaxError, RecursionError):
      same = False
    if not same and self._answered:  # by what the program has returned itself
      raise AssertionError(f"{function} was given what is no plain value")
    if not same:
      raise Unsupported(f"the arguments of {function} are no plain values: {text[:80]}")

    # What comes back is read, never run.
    answer = self._run([sys.executable, "-I", "-c", CALLED], text)
    try:
      value = ast.literal_eval(answer)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
      raise AssertionError(f"{function} gave no plain value") from error
    self._answered = True
    return value

  def count(self, case, *arguments):
    """Runs one case, a function that raises unless all is well."""
    self._answered = False  # whether the program has returned anything in this case
    try:
      case(*arguments)
    except Unsupported as problem:
      self.unsupported = self.unsupported or str(problem)
    except BaseException:  # a value of a wrong type may break an expression in any way
      return
    else:
      self.passed += 1

  def function(self, name):
    """Returns a function that calls that of the program."""
    return lambda *arguments, **named: self.call(name, arguments, named)

  def broken(self, error):
    """Notes that the code before the cases has failed, which is not the program's."""
    self.unsupported = f"the code before the cases raised {type(error).__name__}: {error}"

  def run_calls(self, function, pairs):
    """Compares what a function returns with what it should; lists and tuples are the same."""
    for arguments, expected in pairs:
      self.count(self._check_call, function, arguments, expected)

  def run_programs(self, pairs):
    """Compares what the program writes with what it should, line by line, blanks around lines left out."""
    for text, expected in pairs:
      self.count(self._check_program, text, expected)

  def report(self):
    """Writes the result; nobody else can, as the programs have pipes of their own."""
    told = self.unsupported.encode("utf-8", "replace").replace(b"\n", b" ")[:300]
    os.write(1, b"\n%d %s\n" % (self.passed, told))

  def _check_call(self, function, arguments, expected):
    got = as_lists(self.call(function, tuple(arguments), {}))
    assert expected in (got, [got])

  def _check_program(self, text, expected):
    assert as_lines(self._run([sys.executable, "-I", SOLUTION], text)) == as_lines(expected)

  def _run(self, command, text):
    left = self._ends - time.monotonic()
    if left <= 0.0:
      raise AssertionError("no time is left")
    return self._program(command, text, timeout=min(self._case_timeout, left))


def as_lines(text):
  """Splits a text into its lines, without blanks around them nor around it."""
  return [line.strip() for line in text.strip().splitlines()]


def as_lists(value):
  """Returns a value with lists in place of tuples, as JSON has them."""
  if isinstance(value, (list, tuple)):
    return [as_lists(each) for each in value]
  if isinstance(value, dict):
    return {key: as_lists(each) for key, each in value.items()}
  return value
