"""Mutation testing: puts plausible faults into a copy of the package, one at a time, and looks if a test notices.

    launch/mutate.sh --count=150 --seed=0 [ROOM or ROOM/FILE.py ...]

Each mutant meets the fast tests of its room, those of its own module first, and then what else imports its room; the
first test that fails ends it. Results go to a file, one JSON line each, and the same command goes on after the last.
The working tree is only read. By hand, before a release: survivors are faults that no test would notice.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tools import mutants
from tools.mutants import Mutant

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
ROOMS = ("algorithm", "rollout", "sampler", "training")
CAUGHT, SURVIVED, TIMED_OUT, UNSURE = OUTCOMES = ("caught", "survived", "timed out", "unsure")
PARTS = ("sao_jax", "launch", "configs", "notebooks", "tests")
SECONDS_PER_TEST = 150  # also on a busy machine: a fault that hangs is told from a slow test
# Imported once, before each mutant's process is forked: what it needs and no test changes.
WARM = ("hypothesis", "pytest", "jax", "jax.numpy", "flax", "optax", "orbax.checkpoint", "jaxtyping", "beartype")


def copy_repository(folder: pathlib.Path) -> None:
  """Copies what tests need into an empty folder."""
  for part in PARTS:
    shutil.copytree(REPOSITORY / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
  for path in REPOSITORY.iterdir():
    if path.is_file():
      shutil.copy2(path, folder)


def all_mutants(package: pathlib.Path, wanted: Sequence[str]) -> list[Mutant]:
  """The mutants of rooms, or of single files of them."""
  found = []
  for name in wanted:
    path = package / name
    for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
      found += mutants.find(file.relative_to(package).as_posix(), file.read_text(encoding="utf-8"))
  return found


def imported_modules(path: pathlib.Path) -> set[str]:
  """The modules of the package, and the toys, that a file of tests imports."""
  found: set[str] = set()
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
  return {name for name in found if name.partition(".")[0] in ("sao_jax", "toys")}


def reached_modules(path: pathlib.Path, tests: pathlib.Path) -> set[str]:
  """What a file of tests imports, itself or through its toys."""
  found, queue = set(), [path]
  while queue:
    for name in imported_modules(queue.pop()) - found:
      found.add(name)
      toy = tests / "toys" / f"{name.rpartition('.')[2]}.py"
      if name.startswith("toys.") and toy.is_file():
        queue.append(toy)
  return found


def stages(mutant: Mutant, tests: pathlib.Path) -> Iterator[list[str]]:
  """Yields the files of tests that a mutant meets, in three stages: its module's, its room's, those of its users."""
  module = "sao_jax." + mutant.file.removesuffix(".py").replace("/", ".")
  room = f"sao_jax.{mutant.room}"
  files = sorted(tests.glob("*/test_*.py"))
  reached = {file: reached_modules(file, tests) for file in files}
  of_room = [file for file in files if file.parent.name == mutant.room]
  of_module = [file for file in of_room if module in reached[file]]
  elsewhere = [
    file
    for file in files
    if file not in of_room and any(name == room or name.startswith(f"{room}.") for name in reached[file])
  ]
  elsewhere.sort(key=lambda file: module not in reached[file])
  for stage in (of_module, [file for file in of_room if file not in of_module], elsewhere):
    if stage:
      yield [file.relative_to(tests.parent).as_posix() for file in stage]


def run_tests(folder: pathlib.Path, files: Sequence[str], seconds: float) -> tuple[str, str, float]:
  """Runs files of tests in a process of its own. Returns its outcome, the last line that says why, and its seconds."""
  began = time.monotonic()
  with tempfile.TemporaryFile("w+") as output:
    process = os.fork()
    if not process:
      _test(folder, files, output.fileno())
    status = _wait(process, seconds)
    output.seek(0)
    lines = output.read().splitlines()
  why = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)] or lines[-1:]
  if status is None or "Timeout (>" in "\n".join(lines):
    return TIMED_OUT, why[0] if why else "", time.monotonic() - began
  # 5: all of them are slow. A process that a signal has ended was not fine either.
  return SURVIVED if status in (0, 5) else CAUGHT, why[0] if why else "", time.monotonic() - began


def _test(folder: pathlib.Path, files: Sequence[str], output: int) -> None:
  """The forked process: pytest in the copy, in a session of its own; never returns."""
  status = 70
  try:
    os.setsid()
    # Which a shell, or nohup, has ignored in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for stream in (1, 2):
      os.dup2(output, stream)
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:] = [str(folder), *(path for path in sys.path if not path.startswith(str(REPOSITORY / "tests")))]
    sys.path[:] = [path for path in sys.path if pathlib.Path(path or ".").resolve() != REPOSITORY]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tools", "toys", "sao_jax")]:
      del sys.modules[name]
    import pytest

    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "--tb=line", "-m", "not slow"]
    status = int(pytest.main([*options, f"--timeout={SECONDS_PER_TEST}", *files]))
  finally:
    sys.stdout.flush()
    os._exit(status)


def _wait(process: int, seconds: float) -> int | None:
  """Waits for a process; None when it, and what it has started, had to be killed."""
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline:
    done, status = os.waitpid(process, os.WNOHANG)
    if done:
      return os.waitstatus_to_exitcode(status)
    time.sleep(0.05)
  os.killpg(process, signal.SIGKILL)
  os.waitpid(process, 0)
  return None


class Judge:
  """Meets mutants with the tests of a copy of the repository.

  A test that fails without the fault, too, says nothing: such a mutant is `UNSURE`.
  """

  def __init__(self, folder: pathlib.Path, seconds: float):
    """`seconds`: time-out of a stage of tests."""
    self._folder, self._seconds = folder, seconds
    self._sound: set[str] = set()  # files of tests that pass on the code as it is

  def __call__(self, mutant: Mutant) -> dict[str, Any]:
    """Puts a fault into the copy, runs the stages until a test notices, and takes it out again."""
    path = self._folder / "sao_jax" / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.apply(source), encoding="utf-8")
    outcome, why, spent = SURVIVED, "no test imports it", 0.0
    try:
      for files in stages(mutant, self._folder / "tests"):
        outcome, why, took = run_tests(self._folder, files, self._seconds)
        spent += took
        if outcome != SURVIVED:
          break
    finally:
      path.write_text(source, encoding="utf-8")
    if outcome == CAUGHT and not self._is_sound(why):
      outcome = UNSURE
    return {"mutant": mutant.name, "room": mutant.room, "outcome": outcome, "why": why, "seconds": round(spent, 1)}

  def _is_sound(self, why: str) -> bool:
    """Whether the tests that failed pass on the code as it is."""
    file = re.search(r"tests/\w+/\w+\.py", why)
    if file is not None and file[0] not in self._sound:
      outcome, _, _ = run_tests(self._folder, [file[0]], self._seconds)
      if outcome == CAUGHT:
        return False
      self._sound.add(file[0])
    return True


def table(results: Iterable[dict[str, Any]]) -> str:
  """The outcomes by room, and all of them, as text."""
  counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
  for result in results:
    for room in (result["room"], "all"):
      counts[room][result["outcome"]] += 1
  rows = [("room", *OUTCOMES, "all")]
  rooms = sorted(counts, key=lambda room: (room == "all", room))
  rows += [(room, *(str(counts[room][outcome]) for outcome in OUTCOMES), str(counts[room].total())) for room in rooms]
  return "\n".join("| " + " | ".join(cell.ljust(9) for cell in row) + " |" for row in rows)


def read_results(path: pathlib.Path) -> list[dict[str, Any]]:
  """The results so far; a line that was cut short is left out."""
  results = []
  for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
    try:
      results.append(json.loads(line))
    except json.JSONDecodeError:
      continue
  return results


def _ends_whole(path: pathlib.Path) -> bool:
  """Whether the last line is complete, or there is none."""
  return path.read_bytes()[-1:] in (b"", b"\n")


def main(arguments: Sequence[str]) -> None:
  """Judges a sample of mutants, and prints the table."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("wanted", nargs="*", default=ROOMS, help="rooms, or files below sao_jax")
  parser.add_argument("--count", type=int, default=150, help="mutants to judge, from the rooms in turn; 0: all")
  parser.add_argument("--seed", type=int, default=0, help="of the choice")
  parser.add_argument(
    "--results", type=pathlib.Path, default=pathlib.Path("mutation.jsonl"), help="file of the results"
  )
  parser.add_argument("--seconds", type=float, default=900.0, help="time-out of a stage of tests")
  parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant after so many minutes")
  options = parser.parse_args(arguments)
  deadline = time.monotonic() + 60 * options.minutes

  with tempfile.TemporaryDirectory(prefix="mutation_") as name:
    # A copy, and what of its faults is left to judge.
    folder = pathlib.Path(name).resolve()
    copy_repository(folder)
    found = all_mutants(folder / "sao_jax", options.wanted)
    chosen = mutants.sample(found, options.count or len(found), options.seed)
    known = {result["mutant"] for result in read_results(options.results)}
    left = [mutant for mutant in chosen if mutant.name not in known]
    _say(f"{len(found)} mutants, {len(chosen)} chosen, {len(left)} to judge")
    _warm_up(folder)
    judge = Judge(folder, options.seconds)

    # One after the other, each written down at once.
    for number, mutant in enumerate(left, 1):
      if time.monotonic() > deadline:
        break
      result = judge(mutant)
      with options.results.open("a", encoding="utf-8") as file:
        file.write("\n" * (not _ends_whole(options.results)) + json.dumps(result) + "\n")
      _say(f"{number}/{len(left)} {result['outcome']} in {result['seconds']:.0f} s: {mutant.name}")

  results = [result for result in read_results(options.results) if result["mutant"] in {each.name for each in chosen}]
  _say(table(results))
  for result in results:
    if result["outcome"] in (SURVIVED, UNSURE):
      _say(f"{result['outcome']}: {result['mutant']}")


def _say(text: str) -> None:
  sys.stdout.write(f"{text}\n")
  sys.stdout.flush()


def _warm_up(folder: pathlib.Path) -> None:
  """Imports what every mutant's process needs; no device is started before the fork.

  The cache of compiled programs is a copy of the tests' own: programs of mutants must not fill that one.
  """
  cache, own = pathlib.Path(tempfile.gettempdir()) / f"sao_jax_tests_{os.getuid()}", folder / "compiled"
  if cache.is_dir():
    shutil.copytree(cache, own, ignore_dangling_symlinks=True)
  os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(own), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
  os.environ["JAX_PLATFORMS"] = "cpu"
  warnings.filterwarnings("ignore", message=".*fork.*")
  for name in WARM:
    importlib.import_module(name)


if __name__ == "__main__":
  main(sys.argv[1:])
