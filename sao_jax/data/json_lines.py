"""JSON lines by number: one pass finds where the lines begin, and a record is read when it is asked for."""

from __future__ import annotations

import array
import codecs
import json
import os
import threading
from collections.abc import Sequence
from typing import IO, Any

from sao_jax.data.places import open_file
from sao_jax.episode import BadPrompt
from sao_jax.errors import ConfigError

_REMEDY = "Write one JSON object in a line, in UTF-8"


class JSONLines(Sequence[dict[str, Any]]):
  """The objects of a file with one JSON object in a line. Blank lines are no records; a byte-order mark may come first.

  Only a line break (`\\n`, or `\\r\\n`) ends a line: U+2028, which other readers split at, may stand within a text.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Goes through the file once; keeps 16 bytes for each record.

    Raises:
      ConfigError: there is no such file.
    """
    self.path = os.fspath(path)
    try:
      self._file = open_file(self.path)
    except OSError as error:
      raise ConfigError("data", f"Cannot read {self.path}: {error.strerror or error}.", "Name a file.") from error
    self._lock = threading.Lock()  # an evaluation reads in a thread of its own
    self._offsets, self._numbers = _index(self._file)

  def __len__(self) -> int:
    return len(self._offsets)

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Reads one record.

    Raises:
      BadPrompt: the line holds no JSON object.
    """
    with self._lock:
      self._file.seek(self._offsets[index])
      line = self._file.readline()
    try:
      record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, and of numbers with thousands of digits
      raise _damaged(f"{self.place(index)} is no JSON: {error}") from error
    if not isinstance(record, dict):
      raise _damaged(f"{self.place(index)} holds a {type(record).__name__}, not an object")
    return record

  def place(self, index: int) -> str:
    """Returns the file and the line of a record, for messages."""
    return f"{self.path}:{self._numbers[index]}"


def _index(file: IO[bytes]) -> tuple[array.array, array.array]:
  """Finds the lines that are not blank; returns where each begins, in bytes, and its number, from 1."""
  offsets, numbers, offset = array.array("Q"), array.array("Q"), 0
  for number, line in enumerate(file, 1):
    skipped = len(codecs.BOM_UTF8) if number == 1 and line.startswith(codecs.BOM_UTF8) else 0
    if line[skipped:].strip():
      offsets.append(offset + skipped)
      numbers.append(number)
    offset += len(line)
  return offsets, numbers


def _damaged(problem: str) -> BadPrompt:
  return BadPrompt("data", problem, _REMEDY, reason="prompt_damaged")
