"""The slow tests, as listed in tests/slow.txt: `launch/test.sh --fast` leaves them out, all others run them first."""

from __future__ import annotations

import pathlib

from toys.paths import TESTS

LIST = TESTS / "slow.txt"


def read(path: pathlib.Path = LIST) -> list[str]:
  """The entries of the list, the slowest first: "tests/ROOM/test_NAME.py", alone or with "::test_function"."""
  lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
  return [line for line in lines if line]


def matches(slow: list[str], nodeid: str) -> bool:
  """Whether a test is slow: its file is listed, or its function with all parameters."""
  return nodeid.partition("::")[0] in slow or nodeid.partition("[")[0] in slow


def rank(slow: list[str], nodeid: str) -> int:
  """A key to sort tests by, the same for all tests of a file: its first place in the list, else behind the list."""
  file = nodeid.partition("::")[0]
  return next((i for i, entry in enumerate(slow) if entry.partition("::")[0] == file), len(slow))
