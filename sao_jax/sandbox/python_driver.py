"""The inside of a Python session, as a script: runs one piece of code after another, in one namespace.

Requests come by standard input and answers leave by standard error, both one JSON object in a line; the code that runs
gets neither of them. It has no input, and writes to standard output, errors too. Whatever it does to this process it
does to itself: the other side believes an answer only with the word of its request, and measures time and output.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import json
import linecache
import os
import sys
import traceback
import types
from typing import Any

WORK = "/workspace"
MAX_ERROR = 8000  # characters of a traceback
MAX_FRAMES = 8  # of a traceback
CALL = "<call {}>"  # the name of a piece of code in tracebacks


class Printed(io.RawIOBase):
  """Standard output: keeps so many bytes of each call, and counts the rest."""

  def __init__(self, descriptor: int):
    self._descriptor, self.left, self.dropped = descriptor, 0, 0

  def write(self, data: Any) -> int:
    data = bytes(data)
    kept = data[: self.left]
    self.left -= len(kept)
    self.dropped += len(data) - len(kept)
    put(self._descriptor, kept)
    return len(data)

  def writable(self) -> bool:
    return True

  def fileno(self) -> int:
    return 1

  def close(self) -> None:
    """Stays open: other streams write to it."""


def main() -> None:
  """Serves requests until standard input ends."""
  # Pipes of its own, out of the way of what the code may close.
  requests, answers, printed = os.fdopen(os.dup(0), "rb"), os.dup(2), Printed(os.dup(1))
  nothing = os.open(os.devnull, os.O_RDWR)
  output = os.dup(1)

  # The code's namespace is a module of its own, and its work folder comes first.
  module = types.ModuleType("__main__")
  module.__dict__["__builtins__"] = builtins
  sys.modules["__main__"], sys.argv = module, [""]
  sys.path.insert(0, WORK)
  own = os.getpid()

  for number, line in enumerate(requests, start=1):
    # The code before may have closed or replaced anything.
    request = json.loads(line)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
      os.dup2(source, target)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout, sys.stderr = (open_text(printed) for _ in range(2))
    printed.left, printed.dropped = request["most"], 0

    # The code runs; what it has begun to print is written before the answer.
    error = run(request["code"], module.__dict__, CALL.format(number))
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(Exception):  # it was closed, or is the code's own
        stream.flush()
    if os.getpid() != own:
      os._exit(0)  # a fork that came back
    answer = {"word": request["word"], "error": error, "dropped": printed.dropped}
    try:
      put(answers, json.dumps(answer).encode("ascii") + b"\n")
    except OSError:  # the code has closed it
      os._exit(1)


def open_text(printed: Printed) -> io.TextIOWrapper:
  """Opens standard output as text, written line by line, so that little is lost in a crash."""
  return io.TextIOWrapper(printed, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def run(code: str, namespace: dict[str, Any], name: str) -> str:
  """Runs a piece of code, and shows the value of its last expression; returns its traceback, "" if it has none."""
  try:
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    # A last expression is kept apart, for its value.
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    if last is not None:
      value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
      if value is not None:
        namespace["_"] = value
        sys.stdout.write(f"{value!r}\n")
  except BaseException as error:  # also what ends a program: it must not end this one
    return describe(error, one_line=len(code.strip().splitlines()) == 1)
  return ""


def describe(error: BaseException, *, one_line: bool) -> str:
  """Writes a short traceback: of what raised, the frames of the code itself and the last one.

  Of code with one line, nothing but the exception: its place is known.
  """
  try:
    frames = traceback.extract_tb(error.__traceback__)
    kept = [frame for place, frame in enumerate(frames) if is_call(frame.filename) or place == len(frames) - 1]
    kept = kept if is_call(kept[0].filename) else []  # nothing of the code has run: it cannot be parsed
    # Without columns, which would be marked below each line.
    stack = [traceback.FrameSummary(frame.filename, frame.lineno, frame.name) for frame in kept]
    stack = stack if len(stack) <= MAX_FRAMES else [stack[0], *stack[1 - MAX_FRAMES :]]

    # Its place is left out where it is known.
    said = list(traceback.TracebackException(type(error), error, None).format_exception_only())
    if one_line and len(stack) <= 1:
      text = said[-1]
    else:
      lines = traceback.format_list(stack)
      text = "".join(["Traceback (most recent call last):\n" if lines else "", *lines, *said])
  except BaseException:  # its own methods may do anything
    text = f"{type(error).__name__}, which cannot be shown\n"
  half = MAX_ERROR // 2
  return text if len(text) <= MAX_ERROR else f"{text[:half]}\n[...]\n{text[-half:]}"


def is_call(filename: str) -> bool:
  """Tells if a file name is that of a piece of code."""
  return filename.startswith("<call ")


def put(descriptor: int, data: bytes) -> None:
  """Writes all of the data."""
  while data:
    data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
  main()
