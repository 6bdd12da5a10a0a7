"""One writer per run in a bucket: an object that names the holder, is renewed while the holder lives, and expires.

An object is written on the condition that nobody else has written it meanwhile (a precondition on its generation), so
of two that take it one fails. Nobody compares clocks: who waits takes a holder for dead whose object has not changed
while it looked on.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import logging

from sao_jax.background import beside, now_and_then
from sao_jax.configuration.paths import BUCKET, in_bucket
from sao_jax.errors import ConfigError, RunError
from sao_jax.run_lock import LOCK_FILE, described, refusal

RENEW = 15.0  # seconds between two renewals
EXPIRY = 60.0  # without one, after which another run may take the lock
POLL = 2.0  # seconds between two looks at it


class LockLost(RunError):
  """Another run has taken the lock, or nothing is known of it any more: this one must not write."""


@contextlib.contextmanager
def bucket_lock(
  workdir: pathlib.Path,
  holder: Mapping[str, Any],
  *,
  patience: float,
  dead: Mapping[str, Any] | None = None,
  first_process: bool = True,
) -> Iterator[Callable[[], None]]:
  """Holds the lock of a run in a bucket; yields what renews it, to be called before anything is written.

  On a disk, where `run_lock` does this, and in the other processes of a run nothing is held.

  Args:
    workdir: the run's folder.
    holder: this process, as `run_lock` describes it.
    patience: seconds to wait for another run that lives. For one that may be dead, it is as long as it takes to know.
    dead: a holder that is known to have ended, however it ended.
    first_process: False for the other processes of a run on several hosts.

  Raises:
    ConfigError: another run holds the lock.
  """
  if not in_bucket(workdir) or not first_process:
    yield lambda: None
    return

  lock = BucketLock(_open(workdir), os.fspath(workdir), holder)
  lock.acquire(patience, dead)
  # Before anything is written the lock is renewed again.
  renewing = now_and_then(lock.renew, RENEW, "The lock cannot be renewed: %r. It is tried again.", last=(LockLost,))
  process = os.getpid()
  try:
    with beside(renewing, "bucket lock"):
      yield lock.renew
  finally:
    if os.getpid() == process:  # not in a copy
      lock.release()


class BucketLock:
  """The lock object of a run, and what this process knows of it."""

  def __init__(
    self,
    store: Any,
    where: str,
    holder: Mapping[str, Any],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
  ):
    """Args:
    store: a key-value store of tensorstore, at the run's folder.
    where: the folder's address, for messages.
    holder: this process.
    clock: tells the seconds that have passed.
    sleep: waits between two looks.
    """
    self._store, self._where, self._holder = store, where, dict(holder)
    self._clock, self._sleep = clock, sleep
    self._generation = b""  # of the object, as this process has written it
    self._lock = threading.Lock()

  def acquire(self, patience: float, dead: Mapping[str, Any] | None = None) -> None:
    """Takes the lock, see `bucket_lock`."""
    began = seen_at = self._clock()
    seen, lives, said = None, False, False
    while True:
      # Free, or of a holder that is dead: it is mine, unless somebody is quicker.
      read = self._store.read(LOCK_FILE).result()
      other, now = _parsed(read.value), self._clock()
      if seen != read.stamp.generation:
        seen, seen_at, lives = read.stamp.generation, now, seen is not None
      expired = now - seen_at >= EXPIRY
      mine = other == self._holder  # a write whose answer was lost was tried again, and failed on itself
      if read.state == "missing" or expired or mine or (dead and other == dead):
        if self._write(read.stamp.generation):
          if read.state != "missing" and not mine:
            why = f"it was not renewed for {EXPIRY:g} s" if expired else "that process has ended"
            logging.warning("Took over the lock of %s from %s: %s.", self._where, described(other), why)
          return
        continue

      # It is held, by one that has renewed it, or may be dead.
      if lives and now - began >= patience:
        raise refusal(described(other), self._where, now - began)
      if not said:
        text = "Waiting up to %g s: %s holds %s. If it is dead, its lock expires %g s after the last sign of life."
        logging.info(text, max(patience, EXPIRY), described(other), self._where, EXPIRY)
      said = True
      self._sleep(POLL)

  def renew(self) -> None:
    """Shows that this process lives.

    Raises:
      LockLost: another run has the lock.
      Exception: the bucket cannot be reached; then nothing can be written there, either.
    """
    with self._lock:
      if self._write(self._generation):
        return

      # A write whose answer was lost is tried again, and fails on itself.
      read = self._store.read(LOCK_FILE).result(timeout=EXPIRY)
      if _parsed(read.value) == self._holder and self._write(read.stamp.generation):
        return
      taker = described(_parsed(read.value)) if read.state != "missing" else "somebody who has removed it"
      raise LockLost(
        f"The lock of {self._where} was taken by {taker}, since this process had not renewed it for {EXPIRY:g} s. It "
        "writes nothing more there and ends; the other run goes on from the newest checkpoint."
      )

  def release(self) -> None:
    """Removes the object, if it is this process's own; it expires if that fails."""
    try:
      with self._lock:
        self._store.write(LOCK_FILE, None, if_equal=self._generation).result(timeout=EXPIRY)
    except Exception as error:
      logging.warning("The lock of %s was not removed (%r): it expires in %g s.", self._where, error, EXPIRY)

  def _write(self, generation: bytes) -> bool:
    """Writes the object if it is of this generation still."""
    renewed = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    text = json.dumps({"holder": self._holder, "renewed": renewed, "expires_after_seconds": EXPIRY})
    stamp = self._store.write(LOCK_FILE, text.encode(), if_equal=generation).result(timeout=EXPIRY)
    if stamp.generation:
      self._generation = stamp.generation
    return bool(stamp.generation)


def _parsed(content: bytes) -> dict[str, Any]:
  """The holder in an object; nothing in one that is none of ours."""
  try:
    return json.loads(content)["holder"]
  except (ValueError, LookupError, TypeError):
    return {}


def _open(workdir: pathlib.Path) -> Any:
  """Opens the run's folder as a store with conditional writes; raises ConfigError where that is not possible."""
  import tensorstore

  bucket, _, folder = os.fspath(workdir).removeprefix(BUCKET).partition("/")
  try:
    return tensorstore.KvStore.open({"driver": "gcs", "bucket": bucket, "path": f"{folder.strip('/')}/"}).result()
  except ValueError as error:
    raise ConfigError(
      "--workdir", f"{workdir} cannot be opened: {error}.", "Name one as in gs://BUCKET/DIR."
    ) from error
