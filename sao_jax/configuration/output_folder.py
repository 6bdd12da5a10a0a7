"""Folders that a program writes once, whole: refused before any work where that cannot be, unfinished until the end.

What is written stands in a folder `unfinished` inside of the one that was named: that one may be a link, a mounted disk
or the current folder, none of which can be replaced.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from sao_jax.configuration.paths import expand, in_bucket
from sao_jax.errors import ConfigError

UNFINISHED = "unfinished"


def check_output_folder(path: str | os.PathLike, field: str) -> None:
  """Refuses a folder to write to that is not empty, is none, or cannot be made; makes its parents.

  What a program has left that was killed counts for nothing: the next one takes its place. In a bucket nothing is
  checked.

  Raises:
    ConfigError: naming `field` and the path.
  """
  if in_bucket(path):
    return
  try:
    _check_on_disk(expand(path), path, field)
  except OSError as error:
    raise ConfigError(field, f"cannot write {path}: {error.strerror}.", "Name a place to write to.") from error


def _check_on_disk(folder: pathlib.Path, path: str | os.PathLike, field: str) -> None:
  """The same on a disk; raises OSError, too."""
  if folder.is_symlink() and not folder.exists():
    target = os.readlink(folder)
    raise ConfigError(field, f"{path} is a link to {target}, which is not there.", "Make that folder, or name another.")
  if folder.exists() and not folder.is_dir():
    raise ConfigError(field, f"{path} is a file.", "Name a new folder.")

  # An empty folder is written into; a new one needs a parent to be made in.
  place = folder if folder.is_dir() else folder.parent
  if place == folder:
    names = sorted(name for name in os.listdir(folder) if name != UNFINISHED)
    if names:
      found = ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
      # A program that was killed while its files moved up: whose the others are cannot be told, so none is deleted.
      remedy = "Name a new folder."
      if (folder / UNFINISHED).is_dir():
        remedy = f"{UNFINISHED!r} in it is what a killed program left: if the rest is, too, delete it, or name another."
      raise ConfigError(field, f"{path} is not empty: it holds {found}.", remedy)
  place.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryFile(dir=place):
    pass


@contextlib.contextmanager
def whole_folder(path: str | os.PathLike, last: str) -> Iterator[pathlib.Path]:
  """Yields the folder to write to. When the block ends, its files stand at `path`, the one called `last` last.

  When the block fails, nothing is left of it. In a bucket, where nothing can be renamed, it is `path` itself.
  """
  folder = expand(path)
  if in_bucket(path):
    yield folder
    return
  new, unfinished = not folder.is_dir(), folder / UNFINISHED
  shutil.rmtree(unfinished, ignore_errors=True)
  unfinished.mkdir(parents=True)
  moved: list[str] = []
  try:
    yield unfinished
    for name in sorted(os.listdir(unfinished), key=lambda name: name == last):
      moved.append(name)
      os.replace(unfinished / name, folder / name)
    unfinished.rmdir()
  except BaseException:
    for name in moved:  # back, so that they go with the rest
      with contextlib.suppress(FileNotFoundError):
        os.replace(folder / name, unfinished / name)
    shutil.rmtree(unfinished, ignore_errors=True)
    if new:
      with contextlib.suppress(OSError):
        folder.rmdir()
    raise
