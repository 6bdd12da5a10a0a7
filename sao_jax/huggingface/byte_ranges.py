"""Parts of files, on a disk or in a bucket: nothing but the bytes that are asked for is read."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

from sao_jax.configuration.paths import in_bucket

CHUNK = 8 << 20  # bytes of one request to a bucket
TOGETHER = 4  # requests at the same time


def size_of(path: pathlib.Path) -> int:
  """Returns the size of a file in bytes."""
  found = path.stat()
  return found.length if in_bucket(path) else found.st_size


def read_range(path: pathlib.Path, start: int, length: int) -> bytes:
  """Reads `length` bytes of a file from `start` on; fewer where it ends."""
  if length <= 0:
    return b""
  if not in_bucket(path):
    with path.open("rb") as file:
      file.seek(start)
      return file.read(length)
  import fsspec

  return fsspec.filesystem("gcs").cat_file(os.fspath(path), start=start, end=start + length)


def read_chunks(path: pathlib.Path, start: int, length: int) -> Iterator[bytes]:
  """Yields `length` bytes of a file in a bucket, in order; a few requests are under way together."""
  import fsspec

  files, group = fsspec.filesystem("gcs"), CHUNK * TOGETHER
  for first in range(start, start + length, group):
    last = min(first + group, start + length)
    starts = list(range(first, last, CHUNK))
    ends = [min(each + CHUNK, last) for each in starts]
    yield from files.cat_ranges([os.fspath(path)] * len(starts), starts, ends)
