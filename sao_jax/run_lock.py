"""One writer per run: a lock in the run's folder, which the kernel releases however the process ends."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import functools
import json
import os
import pathlib
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from absl import logging

from sao_jax.errors import ConfigError

LOCK_FILE = "lock"
POLL = 0.5  # seconds between two tries
_COMMAND = 500  # characters of a command line that are kept

_HELD = (errno.EWOULDBLOCK, errno.EACCES)


class Held(NamedTuple):
  """A lock that is held.

  Attributes:
    holder: this process, as the file names it.
    dead: the holder before, if it has ended without a word: where the kernel gives the lock away, it is dead. None if
      it has ended well, or where there are no locks.
  """

  holder: Mapping[str, Any]
  dead: Mapping[str, Any] | None = None


@contextlib.contextmanager
def run_lock(
  folder: pathlib.Path,
  *,
  patience: float,
  first_process: bool = True,
  clock: Callable[[], float] = time.monotonic,
  sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Held]:
  """Holds the lock of the run in `folder`, which is made if need be; programs that only look at a run need none.

  The file names its holder; it stays, and means nothing by being there. Where the file system
  knows no locks, this is said, and nothing is held.

  Args:
    folder: the run's folder.
    patience: seconds to wait for another run: one that was asked to end may still be saving.
    first_process: False for the other processes of a run on several hosts, for which the first one holds the lock.
    clock: tells the seconds that have passed.
    sleep: waits between two tries.

  Raises:
    ConfigError: another process holds the lock for all this time, and nothing in the folder has changed; or the folder
      cannot be written to.
  """
  holder = _holder()
  if not first_process:
    yield Held(holder)
    return

  held = [_open(folder)]
  # Programs that this process starts close the file by themselves. A copy of this process would hold the lock, too, and
  # beyond the death of this one.
  os.register_at_fork(after_in_child=functools.partial(_close, held))

  try:
    dead = None
    if _acquire(held[0], folder, patience, clock, sleep):
      dead = _read(folder)
      _write(held[0], json.dumps(holder))
    try:
      yield Held(holder, dead)
    finally:
      if held:  # not in a copy
        _write(held[0], "")
  finally:
    _close(held)


def _open(folder: pathlib.Path) -> int:
  try:
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
  except OSError as error:
    remedy = "Name a --workdir where you may write, as in --workdir=runs/a."
    raise ConfigError("--workdir", f"cannot write to {folder}: {error.strerror}.", remedy) from error


def _acquire(
  file: int, folder: pathlib.Path, patience: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> bool:
  """Waits for the lock; False where there are no locks."""
  began, said = clock(), False
  while True:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      return True
    except OSError as error:
      if error.errno not in _HELD:
        logging.warning("%s knows no locks (%s): a second run in it would not be noticed.", folder, error.strerror)
        return False

    # Somebody has it; who, tells the file.
    if clock() - began >= patience:
      raise refusal(describe_holder(folder), folder, patience)
    if not said:
      logging.info("Waiting up to %g s: %s holds %s.", patience, describe_holder(folder), folder)
    said = True
    sleep(POLL)


def describe_holder(folder: pathlib.Path) -> str:
  """Describes the process that holds the lock, as far as the file tells."""
  return described(_read(folder))


def described(holder: Mapping[str, Any] | None) -> str:
  """Describes a holder; None for one of whom nothing is known."""
  try:
    return "another run (pid {pid} on {host}, since {since}: {command})".format(**(holder or {}))
  except LookupError:
    return "another run"


def refusal(holder: str, folder: str | os.PathLike, waited: float) -> ConfigError:
  """Makes the error for a folder that another run, as described, holds; it was waited for."""
  return ConfigError(
    "--workdir",
    f"{holder} holds {folder}; waited {waited:g} s.",
    "Let it end or end it, or name a --workdir of its own; --config.training.lock_seconds=600 waits longer.",
  )


def _read(folder: pathlib.Path) -> dict[str, Any] | None:
  """The holder that the file names; None for one that has just begun, or has ended well."""
  try:
    holder = json.loads((folder / LOCK_FILE).read_text(encoding="utf-8"))
    return holder if isinstance(holder, dict) else None
  except (OSError, ValueError):
    return None


def _holder() -> dict[str, Any]:
  """The content of the file while this process holds the lock, as JSON."""
  command = shlex.join(sys.orig_argv)[:_COMMAND].encode("utf-8", "replace").decode()
  return {
    "pid": os.getpid(),
    "host": socket.gethostname(),
    "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    "command": command,
  }


def _write(file: int, text: str) -> None:
  with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode("utf-8", "surrogateescape"), 0)


def _close(held: list[int]) -> None:
  while held:
    os.close(held.pop())
