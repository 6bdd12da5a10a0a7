"""Pipes to and from a command, read and written on the event loop without waiting, and bounded while they are read."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator

PIECE = 65536  # bytes: what a pipe holds


class OutputBudget:
  """Counts the output of one command over all its streams.

  Attributes:
    exceeded: set once the command has written more than the budget.
    truncated: bytes beyond the budget.
  """

  def __init__(self, limit: int):
    self._left = limit
    self.exceeded = asyncio.Event()
    self.truncated = 0

  def take(self, piece: bytes) -> bytes:
    """Returns what of a piece may be kept, and counts the rest."""
    kept = piece[: self._left]
    self._left -= len(kept)
    if len(kept) < len(piece):
      self.truncated += len(piece) - len(kept)
      self.exceeded.set()
    return kept


async def read_bounded(descriptor: int, budget: OutputBudget) -> bytes:
  """Reads a pipe to its end, keeps what the budget allows, and closes the descriptor."""
  kept = bytearray()

  def read(done: asyncio.Future[None]) -> None:
    try:
      piece = os.read(descriptor, PIECE)
    except BlockingIOError:
      return
    kept.extend(budget.take(piece))
    if not piece:
      done.set_result(None)

  loop = asyncio.get_running_loop()
  await _serve(descriptor, loop.add_reader, loop.remove_reader, read)
  return bytes(kept)


@contextlib.contextmanager
def arriving(descriptor: int, take: Callable[[bytes], None]) -> Iterator[None]:
  """Hands over what arrives in a pipe while the block lasts, b"" at its end; the descriptor stays open."""
  loop = asyncio.get_running_loop()

  def step() -> None:
    with contextlib.suppress(BlockingIOError):
      piece = os.read(descriptor, PIECE)
      if not piece:
        loop.remove_reader(descriptor)
      take(piece)

  loop.add_reader(descriptor, step)
  try:
    yield
  finally:
    loop.remove_reader(descriptor)


def read_waiting(descriptor: int, budget: OutputBudget) -> bytes:
  """Reads what waits in a pipe that never blocks, until the budget is exceeded; the descriptor stays open."""
  kept = bytearray()
  with contextlib.suppress(BlockingIOError):
    while not budget.exceeded.is_set() and (piece := os.read(descriptor, PIECE)):
      kept.extend(budget.take(piece))
  return bytes(kept)


async def write_all(descriptor: int, data: bytes) -> None:
  """Writes to a pipe, as far as somebody reads it, and closes the descriptor."""
  left = memoryview(data)

  def write(done: asyncio.Future[None]) -> None:
    nonlocal left
    try:
      left = left[os.write(descriptor, left[:PIECE]) :]
    except BlockingIOError:
      return
    except BrokenPipeError:  # the command has ended, or has closed its standard input
      left = left[:0]
    if not left:
      done.set_result(None)

  loop = asyncio.get_running_loop()
  await _serve(descriptor, loop.add_writer, loop.remove_writer, write)


async def _serve(
  descriptor: int,
  add: Callable[..., None],
  remove: Callable[[int], bool],
  transfer: Callable[[asyncio.Future[None]], None],
) -> None:
  """Calls `transfer` whenever the descriptor is ready, until it sets the future."""
  done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

  def step() -> None:
    try:
      if not done.done():
        transfer(done)
    except OSError as error:
      done.set_exception(error)

  os.set_blocking(descriptor, False)
  add(descriptor, step)
  try:
    await done
  finally:
    remove(descriptor)
    with contextlib.suppress(OSError):
      os.close(descriptor)
