"""The small files of a run whose folder is in a bucket: written on a local disk, and stored as whole objects.

Nothing can be appended to an object, and an object cannot be locked as a file is. Checkpoints are no concern of this
module: they go to the bucket by themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterator

from absl import logging

from sao_jax.background import beside, now_and_then
from sao_jax.configuration.paths import in_bucket

EVERY = 60.0  # seconds between two times that what has changed is stored

# What a run goes on from, beside its checkpoints and the files at the top.
_CONTINUED = ("consumed",)
_OWN = ("lock",)  # means something on this machine only
_UNFINISHED = (".tmp", ".unfinished")


def mirror_folder(workdir: pathlib.Path, process: int = 0) -> pathlib.Path:
  """Returns the folder on a local disk for the small files of a run; that of the run itself, where it is on one."""
  if not in_bucket(workdir):
    return workdir
  cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
  name = hashlib.sha256(os.fspath(workdir).rstrip("/").encode()).hexdigest()[:16]
  return cache / "sao_jax" / "mirrors" / f"{name}.{process}"


@contextlib.contextmanager
def mirrored(
  workdir: pathlib.Path, folder: pathlib.Path, *, every: float = EVERY, before: Callable[[], None] = lambda: None
) -> Iterator[Mirror]:
  """Fetches the files of the run in `workdir` to `folder`, and stores what changes there: now and then, and at the end.

  Where both are the same nothing happens.

  Args:
    workdir: the run's folder, or its address.
    folder: a `mirror_folder`, which this process alone writes to.
    every: seconds between two times.
    before: called before anything is stored; its error is that of storing.
  """
  mirror = Mirror(workdir, folder, before)
  if not in_bucket(workdir):
    yield mirror
    return

  mirror.fetch()
  failed = "Metrics and other small files cannot be stored: %r. They are tried again."
  with beside(now_and_then(mirror.store, every, failed), "mirror"):
    try:
      yield mirror
    except BaseException:
      # What failed first leaves as itself.
      try:
        mirror.store()
      except Exception as error:
        logging.error("The last lines of %s are in %s only: %r.", workdir, folder, error)
      raise
    else:
      mirror.store()


class Mirror:
  """The files of a run in a bucket, and their copies on a local disk.

  Attributes:
    folder: the copies.
  """

  def __init__(self, workdir: pathlib.Path, folder: pathlib.Path, before: Callable[[], None] = lambda: None):
    self.folder = folder
    self._workdir, self._before = workdir, before
    self._stored: dict[str, tuple[int, int]] = {}  # size and time of each file as the bucket has it
    self._lock = threading.Lock()

  def fetch(self) -> None:
    """Makes the folder what the bucket holds: files at the top, and those that a run adds to.

    What an earlier process has left there is lost: it may be older than what another machine has stored.
    """
    self.folder.mkdir(parents=True, exist_ok=True)
    for path in self.folder.iterdir():
      if path.name not in _OWN:
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    # One after the other: they are small.
    for remote in self._held():
      local = self.folder / remote.relative_to(self._workdir)
      local.parent.mkdir(parents=True, exist_ok=True)
      local.write_bytes(remote.read_bytes())
    self._stored = self._files()

  def store(self) -> None:
    """Stores every file that has changed, whole, and removes those that are gone; nothing for a run on a disk.

    A file that changes meanwhile is stored once more the next time.
    """
    if not in_bucket(self._workdir):
      return
    with self._lock:
      self._before()
      now = self._files()
      for name, state in now.items():
        if self._stored.get(name) != state:
          with contextlib.suppress(FileNotFoundError):  # removed since
            (self._workdir / name).write_bytes((self.folder / name).read_bytes())
            self._stored[name] = state
      for name in self._stored.keys() - now.keys():
        (self._workdir / name).unlink(missing_ok=True)
        del self._stored[name]

  def _held(self) -> list[pathlib.Path]:
    """Lists the objects that are fetched."""
    if not self._workdir.is_dir():
      return []
    found = [path for path in self._workdir.iterdir() if path.is_file() and path.name not in _OWN]
    for name in _CONTINUED:
      phases = list((self._workdir / name).glob("*"))
      found += [path for phase in phases for path in phase.glob("*")]
    return found

  def _files(self) -> dict[str, tuple[int, int]]:
    """Lists the files of the folder, with size and time, but for those that are not whole yet."""
    found = {}
    for path in self.folder.rglob("*"):
      with contextlib.suppress(FileNotFoundError):
        state, name = path.stat(), path.relative_to(self.folder).as_posix()
        if path.is_file() and name not in _OWN and path.suffix not in _UNFINISHED:
          found[name] = (state.st_size, state.st_mtime_ns)
    return found
