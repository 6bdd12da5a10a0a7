"""Safetensors files, read and written tensor by tensor: eight bytes of header length, a JSON header, raw data.

Numbers are little-endian, tensors row-major. Only the part that is asked for is in memory; the library `safetensors`
keeps a whole file mapped or in memory, and its NumPy interface has no FP8.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import struct
from collections.abc import Iterable, Iterator, Sequence

import ml_dtypes
import numpy as np

from sao_jax.configuration.paths import in_bucket
from sao_jax.errors import ConfigError
from sao_jax.huggingface.byte_ranges import CHUNK, read_chunks, read_range, size_of
from sao_jax.huggingface.safetensors_header import BITS, LARGEST_HEADER, parse_header

# The dtypes whose tensors can be read as arrays. Those of the others are only copied.
DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
  "I64": np.dtype(np.int64),
  "I32": np.dtype(np.int32),
  "I16": np.dtype(np.int16),
  "I8": np.dtype(np.int8),
  "U8": np.dtype(np.uint8),
  "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of every axis

_POINTER = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """One tensor of a file: the place of its bytes, their dtype and shape."""

  path: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  start: int
  num_bytes: int

  def read(self, bounds: Bounds | None = None) -> np.ndarray:
    """Reads the part within `bounds` (None: all of it) into a new array; no other bytes are read.

    From a bucket come whole rows, of which the columns that are not asked for are left out.
    """
    bounds = bounds or tuple((0, size) for size in self.shape)
    if math.prod(self.shape) == 0:
      return np.empty([stop - start for start, stop in bounds], DTYPES[self.dtype])
    if in_bucket(self.path):
      return self._read_rows(bounds)
    stored = np.memmap(self.path, DTYPES[self.dtype], mode="r", offset=self.start, shape=self.shape)
    return np.array(stored[tuple(slice(start, stop) for start, stop in bounds)])

  def _read_rows(self, bounds: Bounds) -> np.ndarray:
    """Reads rows of the first axis a few megabytes at a time: what is left out of them is not held for long."""
    dtype, inner = DTYPES[self.dtype], tuple(slice(start, stop) for start, stop in bounds[1:])
    result = np.empty([stop - start for start, stop in bounds], dtype)
    if not self.shape:
      return np.frombuffer(read_range(self.path, self.start, self.num_bytes), dtype).reshape(()).copy()
    (first, last), row = bounds[0], self.num_bytes // self.shape[0]

    # All of each row: bytes go where they belong.
    if result.nbytes == (last - first) * row:
      flat, at = result.reshape(-1).view(np.uint8), 0
      for chunk in read_chunks(self.path, self.start + first * row, (last - first) * row):
        flat[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
        at += len(chunk)
      return result

    step = max(1, CHUNK // row)
    for begin in range(first, last, step):
      end = min(begin + step, last)
      rows = np.frombuffer(read_range(self.path, self.start + begin * row, (end - begin) * row), dtype)
      result[begin - first : end - first] = rows.reshape(end - begin, *self.shape[1:])[(slice(None), *inner)]
    return result

  def read_bytes(self, chunk: int = 1 << 24) -> Iterator[bytes]:
    """Yields all of its bytes, at most `chunk` at a time."""
    for offset in range(0, self.num_bytes, chunk):
      yield read_range(self.path, self.start + offset, min(chunk, self.num_bytes - offset))


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
  """Reads the tensors' places from a file.

  Raises:
    ConfigError: naming the file, when it cannot be opened or is no safetensors file from its first byte to its last.
  """
  start = b""
  try:
    size = size_of(path)
    start = read_range(path, 0, min(len(_POINTER), size))
    if size < 8:
      raise ValueError(f"it has {size} bytes")
    (length,) = struct.unpack("<Q", start[:8])
    if length > min(size - 8, LARGEST_HEADER):
      raise ValueError("the header is longer than the file" if length > size - 8 else f"its header has {length} bytes")
    places = parse_header(read_range(path, 8, length), size - 8 - length)

  # A damaged file may hold anything; one that a plain git has cloned holds the address of the real one.
  except (ValueError, OSError, struct.error) as error:
    if start == _POINTER:
      problem, remedy = "a pointer of Git LFS stands in its place", "Run `git lfs pull` in the folder."
    else:
      problem, remedy = str(error), "Copy the file again."
    raise ConfigError("model.checkpoint", f"{path} cannot be read: {problem}.", remedy) from error
  return {
    name: StoredTensor(path, place.dtype, place.shape, 8 + length + place.start, place.stop - place.start)
    for name, place in places.items()
  }


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
  """One tensor to write; `pieces` yields its bytes, and is not touched before their turn comes."""

  name: str
  dtype: str
  shape: tuple[int, ...]
  pieces: Iterable[bytes | memoryview]

  @property
  def num_bytes(self) -> int:
    """The tensor's size in the file, in bytes."""
    return math.prod(self.shape) * BITS[self.dtype] // 8


def write_file(path: pathlib.Path, tensors: Sequence[PlannedTensor]) -> None:
  """Writes the tensors in the given order; one piece of one tensor is in memory at a time."""
  header, offset = {"__metadata__": {"format": "pt"}}, 0
  for tensor in tensors:
    stop = offset + tensor.num_bytes
    header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
    offset = stop
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  with path.open("wb") as file:
    file.write(struct.pack("<Q", len(text)))
    file.write(text)
    for tensor in tensors:
      written = sum(file.write(piece) for piece in tensor.pieces)
      if written != tensor.num_bytes:
        raise ValueError(f"{tensor.name}: {written} bytes were given for {tensor.num_bytes}")
