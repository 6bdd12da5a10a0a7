"""The header of a safetensors file, read as strictly as the library `safetensors` does.

The library reads JSON as Rust's serde does, which is stricter than Python; after that, its tensors must cover the data
from the first byte to the last.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple, NoReturn

# All dtypes of the format, with the bits of an element.
BITS = {
  **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
  **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
  **dict.fromkeys(("U32", "I32", "F32"), 32),
  **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
  "F4": 4,
  "F6_E2M3": 6,
  "F6_E3M2": 6,
}
LARGEST_HEADER = 100_000_000  # bytes

_METADATA, _FIELDS = "__metadata__", ("dtype", "shape", "data_offsets")
_LARGEST = 2**64 - 1  # Rust's usize
_DEEPEST = 127  # nested objects and lists that serde reads


class Place(NamedTuple):
  """The dtype and shape of a tensor, and its bytes, counted from the end of the header."""

  dtype: str
  shape: tuple[int, ...]
  start: int
  stop: int


class _Object(tuple):
  """The members of a JSON object in their order, those of the same name, too."""


def parse_header(header: bytes, data_bytes: int) -> dict[str, Place]:
  """Reads the places of all tensors from the header of a file with so many bytes of data behind it.

  The library takes the last one of two tensors of the same name; here they are an error. It also takes two notations
  that no writer uses: the fields of a tensor as a list, and a dtype as an object.

  Raises:
    ValueError: it is no header of such a file; the text says why.
  """
  # The members of the header: tensors, and notes of the writer.
  entries: dict[str, Any] = {}
  for name, value in _members(header):
    if name in entries:
      raise ValueError(f"{name!r:.100} stands in the header twice")
    entries[name] = value
  notes = entries.pop(_METADATA, None)
  if notes is not None and not (isinstance(notes, _Object) and all(isinstance(text, str) for _, text in notes)):
    raise ValueError(f"{_METADATA} is no map of texts")

  # Tensors in the order of their data: no gap, no overlap, nothing behind the last.
  places = {name: _place(f"{name!r:.100}", entry) for name, entry in entries.items()}
  end = 0
  for name, place in sorted(places.items(), key=lambda item: item[1][2:]):
    if place.start != end:
      raise ValueError(f"{name!r:.100} begins at byte {place.start}, and what is before it ends at {end}")
    end = place.stop
  if end > data_bytes:
    raise ValueError(f"it is cut short: {data_bytes} of {end} bytes of tensors are there")
  if end < data_bytes:
    raise ValueError(f"{data_bytes - end} bytes behind the last tensor belong to none")
  return places


def _members(header: bytes) -> _Object:
  try:
    members = _DECODER.decode(header.decode("utf-8"))
    if b"\\u" in header:
      json.dumps(members, ensure_ascii=False).encode()  # a text with half of a surrogate pair raises ValueError
  except RecursionError as error:
    raise ValueError("its header is nested too deeply") from error
  if not isinstance(members, _Object):
    raise ValueError("its header is no JSON object")
  return members


def _place(name: str, entry: Any) -> Place:
  """Reads what the header says of one tensor. ValueError for what the library refuses."""
  if not isinstance(entry, _Object):
    raise ValueError(f"{name} is no object")
  for field in _FIELDS:
    found = sum(key == field for key, _ in entry)
    if found != 1:
      raise ValueError(f"{name} has {found or 'no'} {field}")
  if any(_deeper_than(_DEEPEST - 2, value) for _, value in entry):  # they are in two objects already
    raise ValueError(f"{name} is nested too deeply")

  # Names and numbers of the right kind.
  dtype, shape, offsets = map(dict(entry).get, _FIELDS)
  if not isinstance(dtype, str) or dtype not in BITS:
    raise ValueError(f"{name} has the unknown dtype {dtype!r:.100}")
  if not _all_counts(shape):
    raise ValueError(f"{name} has the shape {shape!r:.100}")
  if not _all_counts(offsets) or len(offsets) != 2:
    raise ValueError(f"{name} has the data_offsets {offsets!r:.100}")

  # As many bytes as the shape wants. The product of its first axes must be a number, too, where a later one is zero.
  bits = 1
  for size in (*shape, BITS[dtype]):
    bits *= size
    if bits > _LARGEST:
      raise ValueError(f"{name} of shape {shape!r:.100} is too large")
  start, stop = offsets
  if bits % 8 or bits // 8 != stop - start:
    raise ValueError(f"{name} has {stop - start} bytes, its shape and dtype want {bits / 8:g}")
  return Place(dtype, tuple(shape), start, stop)


def _all_counts(value: Any) -> bool:
  return type(value) is list and all(type(number) is int and number <= _LARGEST for number in value)


def _deeper_than(levels: int, value: Any) -> bool:
  """Tells if lists and objects are nested in more than so many levels."""
  if isinstance(value, _Object):
    value = [member for _, member in value]
  return isinstance(value, list) and (not levels or any(_deeper_than(levels - 1, member) for member in value))


def _number(text: str) -> int | float:
  """Reads a number; one with a sign is no count, not even -0."""
  value = float(text)
  if math.isinf(value):
    raise ValueError(f"the number {text:.20} is too large")
  return int(text) if text.isdecimal() else value


def _refuse_constant(text: str) -> NoReturn:
  raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(
  object_pairs_hook=_Object, parse_int=_number, parse_float=_number, parse_constant=_refuse_constant
)
