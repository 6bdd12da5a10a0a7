"""A file of JSON lines that only ever grows by whole lines, on a disk that may be full for a while."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import logging


class LineFile:
  """Appends lines at once, so that a kill loses none; while the file takes none, they wait in memory.

  A full disk is said when it begins and when it ends. The lines follow in their order once there is room; those that
  still wait at `close` are lost, which is said, too.
  """

  def __init__(self, path: pathlib.Path):
    """Opens the file, which is made if need be."""
    self._path, self._file = path, path.open("ab", buffering=0)
    self._waiting: collections.deque[bytes] = collections.deque()
    self._failing = False

  def append(self, line: Mapping[str, Any]) -> None:
    """Writes a line; its values are JSON, without NaN or infinity."""
    self._waiting.append(json.dumps(line, allow_nan=False).encode() + b"\n")
    self._write()

  def close(self) -> None:
    """Closes the file; further calls do nothing."""
    if self._file.closed:
      return
    self._write()
    self._file.close()
    if self._waiting:
      logging.error("%d lines could not be written to %s, and are lost.", len(self._waiting), self._path)

  def _write(self) -> None:
    """Writes what waits, as far as the file takes it."""
    while self._waiting:
      end = os.fstat(self._file.fileno()).st_size
      try:
        self._write_all(self._waiting[0])
      except OSError as error:
        # Half a line would swallow the next one. Making a file shorter needs no room.
        with contextlib.suppress(OSError):
          self._file.truncate(end)
        if not self._failing:
          logging.error("%s takes no further line: %s.", self._path, error)
        self._failing = True
        return
      self._waiting.popleft()

    if self._failing:
      logging.info("%s takes lines again; none is missing.", self._path)
    self._failing = False

  def _write_all(self, data: bytes) -> None:
    written = 0
    while written < len(data):  # a disk that becomes full in between takes a part
      written += self._file.write(data[written:])
