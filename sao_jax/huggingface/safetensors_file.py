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
  """Reads the tensors' places from a file. ConfigError when it is no safetensors file, or cut short."""
  size = size_of(path)
  try:
    (length,) = struct.unpack("<Q", read_range(path, 0, min(8, size)))
    if length > size - 8:
      raise ValueError("the header is longer than the file")
    header = json.loads(read_range(path, 8, length))

    # Offsets count from the end of the header; each must agree with the file, the shape and the dtype.
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
      start, stop = entry["data_offsets"]
      shape = tuple(entry["shape"])
      if 8 + length + stop > size:
        raise ValueError(f"it ends before {name} does")
      if math.prod(shape) * DTYPES[entry["dtype"]].itemsize != stop - start:
        raise ValueError(f"{name} has {stop - start} bytes, its shape and dtype say otherwise")
      tensors[name] = StoredTensor(path, entry["dtype"], shape, 8 + length + start, stop - start)

  # A damaged header may hold anything.
  except (ValueError, KeyError, TypeError, struct.error) as error:
    raise ConfigError("model.checkpoint", f"{path} cannot be read: {error}.", "Copy the file again.") from error
  return tensors


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
    return math.prod(self.shape) * DTYPES[self.dtype].itemsize


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
