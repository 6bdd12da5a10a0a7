"""Headers of safetensors files: what the library `safetensors` refuses is refused, with the name of the file."""

from __future__ import annotations

import collections
import json
import math
import random
import struct

import pytest

from sao_jax.errors import ConfigError
from sao_jax.huggingface import safetensors_header
from sao_jax.huggingface.safetensors_file import read_header

REASON = "the extra `hf` is not installed"
A = '"dtype":"F32","shape":[2],"data_offsets":[0,8]'
REFUSED = {
  "trailing bytes": (f'{{"a":{{{A}}}}}', 9, "1 bytes behind the last tensor"),
  "cut": (f'{{"a":{{{A}}}}}', 7, "cut short: 7 of 8 bytes"),
  "a gap": ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', 2, "'a' begins at byte 1, .* ends at 0"),
  "an overlap": (f'{{"a":{{{A}}},"b":{{"dtype":"U8","shape":[8],"data_offsets":[4,12]}}}}', 12, "'b' begins at byte 4"),
  "the same bytes twice": (f'{{"a":{{{A}}},"b":{{{A}}}}}', 8, "'b' begins at byte 0"),
  "a name twice": (f'{{"a":{{{A}}},"a":{{{A}}}}}', 8, "'a' stands in the header twice"),
  "a field twice": (f'{{"a":{{{A},"dtype":"F32"}}}}', 8, "'a' has 2 dtype"),
  "no shape": ('{"a":{"dtype":"F32","data_offsets":[0,4]}}', 4, "'a' has no shape"),
  "negative": ('{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,-1]}}', 0, r"the shape \[-1"),
  "minus zero": ('{"a":{"dtype":"U8","shape":[0],"data_offsets":[-0,0]}}', 0, r"the data_offsets \[-0"),
  "backwards": ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}', 1, "'a' begins at byte 1|has -1 bytes"),
  "too large": ('{"a":{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}}', 0, "is too large"),
  "half a byte": ('{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}', 1, "want 1.5"),
  "an unknown dtype": ('{"a":{"dtype":"F128","shape":[1],"data_offsets":[0,16]}}', 16, "unknown dtype 'F128'"),
  "a number among texts": ('{"__metadata__":{"step":1}}', 0, "__metadata__ is no map of texts"),
  "half a surrogate": ('{"__metadata__":{"a":"\\ud800"}}', 0, "surrogates not allowed"),
  "not UTF-8": (b'{"__metadata__":{"a":"\xff"}}', 0, "can't decode byte 0xff"),
  "NaN": (f'{{"a":{{{A},"scale":NaN}}}}', 8, "NaN is no JSON"),
  "infinite": (f'{{"a":{{{A},"scale":1e999}}}}', 8, "1e999 is too large"),
  "deep": (f'{{"a":{{{A},"x":{"[" * 126}{"]" * 126}}}}}', 8, "nested too deeply"),
  "a deep shape": (
    '{"a":{"dtype":"F32","data_offsets":[0,4],"shape":' + '{"x":' * 600 + "[]" + "}" * 602,
    4,
    "nested too deeply",
  ),
  "very deep": ("[" * 100_000, 0, "nested too deeply"),
  "a list": ("[]", 0, "no JSON object"),
}
ACCEPTED = {
  "nothing": ("{}", 0),
  "blanks": (f' \n{{"a":{{{A}}}}}\t ', 8),
  "notes": ('{"__metadata__":{"format":"pt","\\ud83d\\ude00":"a","format":"np"}}', 0),
  "no notes": ('{"__metadata__":null}', 0),
  "more fields": (f'{{"a":{{{A},"x":{"[" * 125}{"]" * 125},"x":-1e5}}}}', 8),
  "no elements": ('{"a":{"dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}', 0),
  "in any order": (f'{{"b":{{"dtype":"U8","shape":[],"data_offsets":[8,9]}},"a":{{{A}}}}}', 9),
  "packed": ('{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}', 3),
}


def file_of(header, data_bytes):
  header = header.encode() if isinstance(header, str) else header
  return struct.pack("<Q", len(header)) + header + bytes(data_bytes)


def read_by_library(content):
  """The tensors as the library reads them from the bytes of a file; None for what it refuses."""
  safetensors = pytest.importorskip("safetensors", reason=REASON)
  try:
    tensors = safetensors.deserialize(content)
  except safetensors.SafetensorError:
    return None
  return {name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"])) for name, tensor in tensors}


def read_by_us(path, content):
  """The same by `read_header`, which may refuse it by one error alone, with the name of the file."""
  path.write_bytes(content)
  try:
    tensors = read_header(path)
  except ConfigError as error:
    assert str(path) in error.problem
    return None
  return {name: (each.dtype, each.shape, b"".join(each.read_bytes())) for name, each in tensors.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path, name):
  header, data_bytes, words = REFUSED[name]
  path = tmp_path / "model.safetensors"
  path.write_bytes(file_of(header, data_bytes))
  with pytest.raises(ConfigError, match=f"model.safetensors cannot be read: .*({words})"):
    read_header(path)
  if name != "a name twice":  # of which the library takes the last one
    assert read_by_library(file_of(header, data_bytes)) is None


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted(tmp_path, name):
  content = file_of(*ACCEPTED[name])
  ours = read_by_us(tmp_path / "a", content)
  assert ours is not None and ours == read_by_library(content)


def test_the_dtypes_are_those_of_the_library(tmp_path):
  """Each with the bits of an element; eight of them are whole bytes."""
  known = [*safetensors_header.BITS, "F8_E3M4", "I4", "U4", "F80", "f32"]
  for dtype in known:
    for bits in (4, 6, 8, 16, 32, 64):
      content = file_of(f'{{"a":{{"dtype":"{dtype}","shape":[8],"data_offsets":[0,{bits}]}}}}', bits)
      ours = read_by_us(tmp_path / "a", content)
      assert ours == read_by_library(content) and (ours is not None) == (safetensors_header.BITS.get(dtype) == bits)


@pytest.mark.parametrize(
  "content, words",
  [
    (b"", "it has 0 bytes"),
    (b"1234567", "it has 7 bytes"),
    (struct.pack("<Q", 3) + b"{}", "longer than the file"),
    (struct.pack("<Q", 2**64 - 1) + b"{}", "longer than the file"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "pointer of Git LFS"),
  ],
)
def test_files_that_are_none(tmp_path, content, words):
  path = tmp_path / "model.safetensors"
  path.write_bytes(content)
  with pytest.raises(ConfigError, match=f"model.safetensors cannot be read: .*{words}"):
    read_header(path)
  assert read_by_library(content) is None


def test_a_header_above_the_limit_is_not_even_read(tmp_path):
  path, size = tmp_path / "a", safetensors_header.LARGEST_HEADER + 1
  with path.open("wb") as file:
    file.write(struct.pack("<Q", size))
    file.truncate(8 + size)
  with pytest.raises(ConfigError, match=f"its header has {size} bytes"):
    read_header(path)
  with pytest.raises(ConfigError, match="nothing cannot be read: .*No such file"):
    read_header(tmp_path / "nothing")


def test_mutated_files_are_read_as_by_the_library_or_refused_as_by_it(tmp_path):
  """Ten thousand of them. A name that stands twice is refused always; the library takes the last one."""
  rng, path, outcomes = random.Random(0), tmp_path / "model.safetensors", collections.Counter()
  for _ in range(10_000):
    content = mutated(rng)
    ours, theirs = read_by_us(path, content), read_by_library(content)
    assert ours is None or ours == theirs, content
    assert ours == theirs or has_name_twice(content), content
    outcomes[ours is not None] += 1
  assert min(outcomes.values()) > 1_500, outcomes


NUMBERS = (
  "0",
  "1",
  "2",
  "3",
  "4",
  "8",
  "-0",
  "-1",
  "1.0",
  "1e2",
  "1e999",
  "00",
  "4294967296",
  str(2**64 - 1),
  str(2**64),
)
VALUES = (
  *NUMBERS,
  "NaN",
  "Infinity",
  "null",
  "true",
  "[]",
  "{}",
  '""',
  '"F32"',
  '"\\ud800"',
  '"\\ud83d\\ude00"',
  '"\x01"',
)
PIECES = (
  *VALUES,
  *('"__metadata__":{"a":"b"},', '"dtype":"F4",', '"x":[[{"y":1}]],', '"shape":[0],', '"data_offsets":[0,4],'),
  *('{"a":', ",", ":", "[", "]", "{", "}", " ", "\n", "\t", "\\", '"', "\0", "\x85", "\ufeff", "é"),
)


def mutated(rng):
  """A small file, sometimes as it should be, sometimes with damages of several kinds."""
  tensors, at, notes = [], 0, {"__metadata__": {"format": "pt"}} if rng.random() < 0.5 else {}
  for name in rng.sample(["a", "b", "c", "w.x", "é"], rng.randrange(4)):
    dtype, shape = rng.choice([*safetensors_header.BITS]), [rng.randrange(5) for _ in range(rng.randrange(3))] + [8]
    stop = at + safetensors_header.BITS[dtype] * math.prod(shape) // 8
    tensors.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [at, stop]}))
    at = stop
  rng.shuffle(tensors)

  # Damages to what the header says, then to its text: a number or a piece of it; then to its bytes, and to the file.
  damages = rng.choice([0, 1, 1, 2]) if tensors else 0
  for _ in range(damages):
    damage(rng, rng.choice(tensors)[1])
  text = json.dumps(notes | dict(tensors), ensure_ascii=rng.random() < 0.5, separators=rng.choice([(",", ":"), None]))
  text = text.replace('"?"', rng.choice(VALUES))
  for _ in range(rng.choice([0, 0, 0, 1] if damages else [0, 1, 1, 2])):
    place = rng.randrange(len(text) + 1)
    kind, length = rng.randrange(5), rng.randrange(1, 8)
    if kind == 0:
      digits = [i for i, character in enumerate(text) if character.isdecimal()] or [0]
      place = rng.choice(digits)
      text = text[:place] + rng.choice(NUMBERS) + text[place + 1 :]
    elif kind == 1:
      text = text[:place] + rng.choice(PIECES) + text[place:]
    elif kind == 2:
      text = text[:place] + text[place + length :]
    elif kind == 3:
      text = text[:place] + text[place : place + 8 * length] * 2 + text[place + 8 * length :]
    else:
      text = text.replace(rng.choice(['"a"', '"shape"', '"dtype"', "F32", ":", ","]), rng.choice(PIECES + ('"b"',)), 1)
  header = bytearray(text.encode())
  if header and rng.random() < 0.1:
    header[rng.randrange(len(header))] = rng.randrange(256)
  content = bytearray(file_of(bytes(header), max(0, at + rng.choice([0] * 8 + [-1, 1]))))
  if rng.random() < 0.05:
    content[rng.randrange(8)] = rng.randrange(256)
  return bytes(content[: rng.randrange(len(content))] if rng.random() < 0.02 else content)


def damage(rng, entry):
  """Changes one field of a tensor, or takes it away; "?" stands for any value."""
  field = rng.choice([*entry, "more"])
  kind = rng.randrange(6)
  if kind == 0:
    entry[field] = rng.choice(["?", ["?"], {"deeper": "?"}])
  elif kind == 1:
    entry.pop(field, None)
  elif kind == 2 and len(entry.get("data_offsets", "")) == 2:
    entry["data_offsets"] = [
      at + rng.choice([-8, -1, 0, 1, 8]) if isinstance(at, int) else at for at in entry["data_offsets"]
    ]
  elif kind == 3 and isinstance(entry.get("shape"), list):
    entry["shape"].insert(rng.randrange(len(entry["shape"]) + 1), rng.choice(["?", 0, 1, 2, 2**61]))
  elif kind == 4:
    entry["dtype"] = rng.choice([*safetensors_header.BITS, "F128"])
  else:
    entry["more"] = rng.choice([1, "a", ["?"], {"a": ["?"]}])


def has_name_twice(content):
  """Tells if two members of the outermost object have the same name."""
  levels = []
  json.loads(
    content[8 : 8 + struct.unpack("<Q", content[:8])[0]].decode(),
    object_pairs_hook=lambda pairs: levels.append([name for name, _ in pairs]) or {},
  )
  return len(set(levels[-1])) < len(levels[-1])
