"""Comma-separated values by number: one pass finds where the records begin, and one is read when it is asked for."""

from __future__ import annotations

import array
import codecs
import csv
import os
import threading
from collections.abc import Iterator, Sequence
from typing import IO

from sao_jax.data.places import open_file
from sao_jax.episode import BadPrompt
from sao_jax.errors import ConfigError


class CSVRecords(Sequence[dict[str, str]]):
  """The records of a file whose first line names the fields; a quoted value may go on over lines. All values are texts.

  A byte-order mark may come first, and blank lines are no records.
  """

  def __init__(self, path: str | os.PathLike[str], columns: Sequence[str]):
    """Goes through the file once; keeps 16 bytes for each record.

    Args:
      path: the file, which may lie in a bucket (gs://).
      columns: names of the fields that records have.

    Raises:
      ConfigError: there is no such file, it is none of this kind, or it lacks a column.
    """
    self.path = os.fspath(path)
    try:
      self._file = open_file(self.path)
    except OSError as error:
      raise ConfigError("data", f"Cannot read {self.path}: {error.strerror or error}.", "Name a file.") from error
    self._lock = threading.Lock()  # an evaluation reads in a thread of its own
    try:
      self._header, self._offsets, self._numbers = _index(self._file)
    except (csv.Error, UnicodeDecodeError) as error:
      remedy = "Write it in UTF-8, with quotes around values that have line breaks."
      raise ConfigError("data", f"{self.path} has no comma-separated values: {error}.", remedy) from error
    missing = sorted(set(columns) - set(self._header))
    if missing:
      raise ConfigError("data", f"{self.path} has no column {missing}.", f"Choose among {sorted(self._header)}.")

  def __len__(self) -> int:
    return len(self._offsets)

  def __getitem__(self, index: int) -> dict[str, str]:
    """Reads one record.

    Raises:
      BadPrompt: it has more or fewer values than there are fields.
    """
    with self._lock:
      self._file.seek(self._offsets[index])
      values = next(csv.reader(_lines(self._file)))
    if len(values) != len(self._header):
      problem = f"{self.place(index)} has {len(values)} values for {len(self._header)} fields"
      raise BadPrompt("data", problem, "Quote values that have commas or line breaks", reason="prompt_damaged")
    return dict(zip(self._header, values))

  def place(self, index: int) -> str:
    """Returns the file and the first line of a record, for messages."""
    return f"{self.path}:{self._numbers[index]}"


def _lines(file: IO[bytes]) -> Iterator[str]:
  """Yields the lines from where the file stands, line by line, so that it then stands behind the last one."""
  while line := file.readline():
    yield line.removeprefix(codecs.BOM_UTF8).decode("utf-8")


def _index(file: IO[bytes]) -> tuple[list[str], array.array, array.array]:
  """Returns the names of the fields, where each record begins, in bytes, and the number of its first line, from 1."""
  offsets, numbers, header = array.array("Q"), array.array("Q"), []
  reader, offset, number = csv.reader(_lines(file)), 0, 1
  for values in reader:
    if values and not header:
      header = values
    elif values:
      offsets.append(offset)
      numbers.append(number)
    offset, number = file.tell(), reader.line_num + 1
  return header, offsets, numbers
