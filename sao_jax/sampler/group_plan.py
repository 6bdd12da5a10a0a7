"""The plan of a sampler whose mesh spans several processes, as bytes: the calls of its engine, in order.

An engine's state on the host follows from the calls of its methods alone. Whoever makes the same calls starts the same
programs with the same arrays, however many programs there are, and page tables need not travel.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sao_jax.sampler.prefill import Extension, Piece

# The methods of an engine that change it, or start a program.
CALLS = frozenset({"extend", "decode", "reserve", "release", "publish", "warm_up"})
# Beside these: a program of somebody else, whose place in the order this is, and weights that nobody needs any more.
TURN, FREE = "turn", "free"

_SIZE = struct.Struct("!I")
_TOKENS = np.dtype("<i4")


class Call(NamedTuple):
  """One call: a method's name, and its arguments."""

  name: str
  arguments: tuple[Any, ...] = ()


class WeightsName(NamedTuple):
  """Fixed weights of an engine, as other processes know them: their version, and the key's numbers."""

  version: int
  key: tuple[int, ...]


def encode(calls: Sequence[Call]) -> bytes:
  """The bytes of some calls, in order: JSON, and behind it all tokens as they are.

  Arguments are whole numbers, floats, booleans, strings, None, `Extension`s, `Piece`s, `WeightsName`s, mappings from
  numbers to numbers, and sequences of all these. A `Piece` comes back as one of an extension that is no longer than it.

  >>> decode(encode([Call("release", (3,)), Call("decode", (4, {0: 17, 2: 9}, None))]))
  [Call(name='release', arguments=(3,)), Call(name='decode', arguments=(4, {0: 17, 2: 9}, None))]
  """
  tokens: list[np.ndarray] = []
  text = json.dumps([[call.name, *(_pack(argument, tokens) for argument in call.arguments)] for call in calls])
  head = text.encode()
  return b"".join([_SIZE.pack(len(head)), head, *(part.tobytes() for part in tokens)])


def decode(message: bytes) -> list[Call]:
  """The calls of a message; sequences come back as lists, tokens as lists of numbers."""
  start = _SIZE.size + _SIZE.unpack_from(message)[0]
  calls = json.loads(message[_SIZE.size : start])
  tokens = _Tokens(np.frombuffer(message, _TOKENS, offset=start).tolist())
  return [Call(name, tuple(_unpack(argument, tokens) for argument in arguments)) for name, *arguments in calls]


def _pack(value: Any, tokens: list[np.ndarray]) -> Any:
  """A value as JSON; tokens go to the end of `tokens`."""
  if isinstance(value, Extension):
    ids = np.asarray(value.token_ids, _TOKENS)
    tokens.append(ids)
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {"extension": fields | {"token_ids": len(ids)}}
  if isinstance(value, Piece):
    # Of a long prompt a piece is small; the pending token is the last one all the same.
    own = [*value.token_ids, value.extension.token_ids[-1]]
    cut = dataclasses.replace(value.extension, start=value.start, token_ids=own)
    return {"piece": [_pack(cut, tokens), value.count, value.last]}
  if isinstance(value, WeightsName):
    return {"weights": value}
  if isinstance(value, Mapping):
    return {"numbers": [[int(key), int(number)] for key, number in value.items()]}
  if isinstance(value, Sequence) and not isinstance(value, str):
    return [_pack(item, tokens) for item in value]
  if isinstance(value, np.integer):
    return int(value)
  return value


def _unpack(value: Any, tokens: _Tokens) -> Any:
  if isinstance(value, list):
    return [_unpack(item, tokens) for item in value]
  if not isinstance(value, dict):
    return value

  ((kind, content),) = value.items()
  if kind == "numbers":
    return dict(content)
  if kind == "piece":
    extension, count, last = content
    return Piece(_unpack(extension, tokens), 0, count, last)
  if kind == "weights":
    version, key = content
    return WeightsName(version, tuple(key))
  ids = tokens.take(content["token_ids"])
  return Extension(**content | {"token_ids": ids, "stop_ids": tuple(content["stop_ids"])})


class _Tokens:
  """All tokens of a message, taken in the order in which they were packed."""

  def __init__(self, ids: list[int]):
    self._ids, self._next = ids, 0

  def take(self, count: int) -> list[int]:
    """The next `count` of them."""
    self._next += count
    return self._ids[self._next - count : self._next]
