"""The judge of a repository's hidden tests, as a script inside a sandbox: runs them, and reports how each one ended.

It never imports the repository's code: a child process does, for every session of tests a new one. What a child says
about its tests comes through a pipe; the judge's own output has a word that no child has ever had in its memory.

Its input has four parts: a `Task`, two `Session`s, and that word. A part is read when it is wanted, and waits in the
pipe until then: a child of the first session knows nothing of the second.

A child can kill or stop the judge. So the judge says when it begins: from then on, what ends it is the child's fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

PR_SET_DUMPABLE = 4
GUARDED = ("_pytest", "pytest", "pluggy", "unittest", "builtins")  # whose functions tests rely on
SECOND = "/tmp/second"  # the folder of the second session
OWN = "_getini_unknown_type"  # of pytest, which its plugin legacypath replaces
LOG = "/tmp/tests.log"
SHOWN = 4000  # bytes of the log, its end
BEGUN = "begun"  # the first line of what it prints

Say = Callable[[dict[str, Any]], None]


class Task(TypedDict):
  """The settings of all tests."""

  runner: str  # "pytest" or "functions"
  packages: list[str]  # folders to import from behind the repository's own
  sources: list[str]  # folders of the repository to import from, first
  timeout: float  # seconds for one session


class Session(TypedDict):
  """The tests of one child."""

  files: dict[str, str]  # path -> text
  wanted: list[str]  # ids of tests


def main() -> None:
  """Runs the sessions, each in a folder of its own; prints the word and what was said in each of them."""
  ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process of the same user may look into this one
  task: Task = json.loads(_part())
  sys.dont_write_bytecode = True
  sys.path += task["packages"]
  work = os.getcwd()

  # All that tests are run by is imported now, before anything of the repository could be in its place.
  problem = _import_pytest() if task["runner"] == "pytest" else ""

  # What the first session leaves behind must not meet the second one.
  subprocess.run(["cp", "-a", work, SECOND], check=True)
  told = []
  os.write(1, f"{BEGUN}\n".encode("ascii"))
  for folder in (work, SECOND):
    session: Session = json.loads(_part())
    said = [] if problem else _run_session(task, session, folder)
    told.append(_sum_up(said, frozenset(session["wanted"])))

  # The end of what tests have printed is for people.
  with open(LOG, "ab+") as log:
    log.seek(max(0, log.seek(0, os.SEEK_END) - SHOWN))
    shown = log.read().decode("utf-8", "replace")
  answer = json.dumps({"problem": problem, "told": told, "log": shown})
  sys.stdout.write(f"\n{_part()} {answer}\n")


def _part() -> str:
  """Reads one part of standard input and nothing behind it: its length, a line's end, and so many bytes."""
  length = b""
  while not length.endswith(b"\n"):
    length += _read_some(1)
  part = b""
  while len(part) < int(length):
    part += _read_some(int(length) - len(part))
  return part.decode("utf-8")


def _read_some(most: int) -> bytes:
  piece = os.read(0, most)
  if not piece:
    raise SystemExit("the input has ended")
  return piece


def _import_pytest() -> str:
  """Imports pytest with all its plugins, before anything of the repository can take their names."""
  try:
    config = importlib.import_module("_pytest.config")
    for name in config.default_plugins:
      importlib.import_module(f"_pytest.{name}")
    for name in ("pytest", "unittest.mock"):
      importlib.import_module(name)
  except ImportError as error:
    return f"pytest cannot be imported: {error}"
  return ""


def _write(path: str, text: str) -> None:
  """Writes a file of tests over whatever is there."""
  os.makedirs(os.path.dirname(path), exist_ok=True)
  if os.path.lexists(path):
    os.remove(path)
  with open(path, "w", encoding="utf-8", newline="") as file:
    file.write(text)


def _run_session(task: Task, session: Session, folder: str) -> list[dict[str, Any]]:
  """Runs tests in a new process; returns what it has said until it ended or had to be ended."""
  for path, text in session["files"].items():
    _write(os.path.join(folder, path), text)
  # The child has one end of a pipe, and nothing else of this process that is open.
  read_end, write_end = os.pipe()
  child = os.fork()
  if child == 0:
    os.close(read_end)
    _serve(task, session, folder, write_end)
  os.close(write_end)
  said, end = bytearray(), time.monotonic() + task["timeout"]

  # The end of the pipe is the end of all that hold it; what goes on without it is killed anyway.
  while (left := end - time.monotonic()) > 0:
    ready, _, _ = select.select([read_end], [], [], left)
    piece = os.read(read_end, 65536) if ready else b""
    if not piece:
      break
    said += piece
  with contextlib.suppress(ProcessLookupError):
    os.kill(-1, signal.SIGKILL)
  os.waitpid(child, 0)
  os.close(read_end)
  return [told for line in said.splitlines() if (told := _read(line)) is not None]


def _sum_up(said: list[dict[str, Any]], wanted: frozenset[str]) -> dict[str, list[str]]:
  """Says which of the wanted tests passed in all their phases, or failed as expected, and which functions changed."""
  ends: dict[str, set[str]] = {"passed": set(), "xfailed": set(), "other": set()}
  for told in said:
    outcome, called = told.get("outcome"), told.get("phase") == "call"
    if called or outcome != "passed":
      ends[outcome if outcome in ends else "other"].update(_names(str(told.get("id"))))
  replaced = [str(name) for told in said for name in told.get("replaced") or ()]
  good = {end: sorted((ends[end] - ends["other"]) & wanted) for end in ("passed", "xfailed")}
  return {**good, "replaced": list(dict.fromkeys(replaced))[:10]}


def _names(test: str) -> tuple[str, str]:
  """Returns the names under which a test may be wanted: lists that were read from a summary end at the first blank."""
  return test, test.split(" ")[0]


def _read(line: bytes) -> dict[str, Any] | None:
  try:
    told = json.loads(line)
  except (ValueError, RecursionError):
    return None
  return told if isinstance(told, dict) else None


def _serve(task: Task, session: Session, folder: str, channel: int) -> None:
  """Runs tests in the child; never returns."""
  try:
    # Nothing of the judge's stays open here. The log takes what tests print.
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open("/dev/null", os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
      os.dup2(source, target)
    os.setsid()

    # From here on it is an ordinary process, in the repository's folder.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.chdir(folder)
    sources = [os.path.normpath(os.path.join(folder, source)) for source in task["sources"]]
    sys.path[:0] = [source for source in sources if os.path.isdir(source)]
    os.environ["PYTHONPATH"] = ":".join([*sources, *task["packages"]])  # of programs that tests start

    # Kept before anybody could replace them.
    write, dumps = os.write, json.dumps
    say: Say = lambda told: write(channel, f"{dumps(told)}\n".encode("ascii")) and None  # noqa: E731
    run = _run_pytest if task["runner"] == "pytest" else _run_functions
    run(sorted(session["files"]), frozenset(session["wanted"]), say, _guard())
  finally:
    os._exit(0)


def _guard() -> Callable[[], list[str]]:
  """Remembers the functions that tests rely on; the result names those that were replaced since."""
  kept: list[tuple[str, Mapping[str, Any], str, Any, types.FunctionType | None, Any]] = []

  def keep(label: str, names: Mapping[str, Any]) -> None:
    for key, value in names.items():
      function = getattr(value, "__func__", value)
      if key != OWN and (callable(function) or isinstance(value, property)):
        code = function.__code__ if isinstance(function, types.FunctionType) else None
        kept.append((f"{label}.{key}", names, key, value, function if code else None, code))

  # Functions of modules, and of the classes that are defined there.
  for name, module in list(sys.modules.items()):
    if name.partition(".")[0] in GUARDED:
      keep(name, vars(module))
      for key, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == name != "builtins":
          keep(f"{name}.{key}", vars(value))
  traced = sys.gettrace, sys.getprofile

  def replaced() -> list[str]:
    found = [
      label
      for label, names, key, value, function, code in kept
      if names.get(key) is not value or (function is not None and function.__code__ is not code)
    ]
    return found + [f"sys.{look.__name__}" for look in traced if look() is not None]

  return replaced


def _run_pytest(paths: Sequence[str], wanted: frozenset[str], say: Say, replaced: Callable[[], list[str]]) -> None:
  """Runs tests by their node ids with pytest."""
  import pytest

  # A plugin that no file of the repository names, and none can leave out.
  class Reporter:
    """Leaves out what is not wanted, and says how each phase of a test ended."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
      items[:] = [item for item in items if wanted.intersection(_names(item.nodeid))]
      self.marked = {item.nodeid for item in items if item.get_closest_marker("xfail")}

    def pytest_runtest_logreport(self, report: Any) -> None:
      # Only a test's author may expect a failure: code that calls pytest.xfail is no author.
      expected = report.nodeid in self.marked and hasattr(report, "wasxfail") and report.outcome == "skipped"
      outcome = "xfailed" if expected else report.outcome
      say({"id": report.nodeid, "phase": report.when, "outcome": outcome, "replaced": replaced()[:3]})

  options = ["--rootdir=.", "--continue-on-collection-errors", "-q", "--no-header", "-p", "no:cacheprovider"]
  pytest.main([*options, *paths], plugins=[Reporter()])


def _run_functions(paths: Sequence[str], wanted: frozenset[str], say: Say, replaced: Callable[[], list[str]]) -> None:
  """Runs plain functions `path::name`, without fixtures and without any package."""
  for path in paths:
    # By its path: a name might mean another module.
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(spec)
    try:
      spec.loader.exec_module(module)
    except Exception as error:
      os.write(2, f"{path}: {error!r}\n".encode("utf-8", "replace"))
      continue

    # In the order of the file.
    for name in [name for name in vars(module) if f"{path}::{name}" in wanted]:
      outcome = "passed"
      try:
        getattr(module, name)()
      except Exception as error:
        os.write(2, f"{path}::{name}: {error!r}\n".encode("utf-8", "replace"))
        outcome = "failed"
      say({"id": f"{path}::{name}", "phase": "call", "outcome": outcome, "replaced": replaced()[:3]})


if __name__ == "__main__":
  main()
