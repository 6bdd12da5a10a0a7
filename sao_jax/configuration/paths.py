"""Folders that people name, on a disk or in a bucket (gs://).

`~` is their home, and a name under which nothing could be read again is refused.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib

from etils import epath

from sao_jax.errors import ConfigError

BUCKET = "gs://"

_GLOB = "*?["  # the library under the checkpoints looks for its files by patterns, parent folders included
_LONGEST = 3500  # bytes; systems allow 4096, and the files of a checkpoint lie deeper


def expand(path: str | os.PathLike) -> pathlib.Path:
  """Makes a path absolute, so that it stays the same in another current folder; a leading `~` is a home.

  An address of a bucket becomes an `epath.Path`, which has those methods of a `pathlib.Path` that a bucket can have.
  """
  return located(path) if in_bucket(path) else pathlib.Path(os.path.expanduser(path)).absolute()


def located(path: str | os.PathLike) -> pathlib.Path:
  """Returns a path, or the address of a bucket, as an object; unlike `expand` it leaves a path as it was given."""
  if not in_bucket(path):
    return pathlib.Path(path)
  import fsspec  # beside epath

  # Tensorstore and other processes write to the bucket, too: a listing is old at once.
  fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
  return epath.Path(path)


def in_bucket(path: str | os.PathLike) -> bool:
  """Tells the address of a bucket from a path."""
  return os.fspath(path).startswith(BUCKET)


def move(source: pathlib.Path, target: pathlib.Path) -> None:
  """Renames a folder, making the parents of its new name; in a bucket, file by file."""
  if not in_bucket(source):
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)
    return
  import fsspec

  fsspec.filesystem("gcs").mv(os.fspath(source), os.fspath(target), recursive=True)


def check_storable(path: pathlib.Path, field: str) -> None:
  """Refuses a folder in which checkpoints could be written and not read again.

  Raises:
    ConfigError: naming `field` and the characters.
  """
  check_readable(path, field)
  found = [character for character in _GLOB if character in str(path)]
  if found:
    raise ConfigError(
      field,
      f"{path} has {' and '.join(found)} in it, which the library under the checkpoints takes for a pattern.",
      "Leave * ? [ out of the names of the folder and of its parents, as in runs/lr_1e-4.",
    )


def check_readable(path: pathlib.Path, field: str) -> None:
  """Refuses names that the library under the checkpoints cannot open at all.

  Raises:
    ConfigError: naming `field` and what is wrong.
  """
  if in_bucket(path) and importlib.util.find_spec("gcsfs") is None:
    raise ConfigError(field, f"{path} is in a bucket, and gcsfs is missing.", "pip install -e '.[gcs]'")
  problem = None
  if "\\" in str(path):
    problem = "has a backslash in it, which the library under the checkpoints takes for a slash"
  elif any(0xD800 <= ord(character) < 0xE000 for character in str(path)):  # bytes that Python has kept as they were
    problem = "has a name that is not UTF-8"
  elif "\0" in str(path):
    problem = "has a zero byte in it"
  elif len(os.fsencode(path)) > _LONGEST:
    problem = f"is longer than {_LONGEST} bytes"
  if problem:
    shown = ascii(str(path)[:200])
    raise ConfigError(field, f"{shown} {problem}.", "Rename the folder or its parent, or name another one.")
