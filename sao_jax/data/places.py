"""Places of data: paths on a disk, and addresses in a bucket (gs://), which need no copy on a disk."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from typing import IO, Any

from sao_jax.errors import ConfigError

BUCKET = "gs://"


def place_of(path: str) -> Any:
  """Returns a path on a disk, where `~` is a home, or the address of one in a bucket, with the same methods.

  Raises:
    ConfigError: it is in a bucket, and the package that reads buckets is missing.
  """
  if not path.startswith(BUCKET):
    return pathlib.Path(os.path.expanduser(path))
  if importlib.util.find_spec("gcsfs") is None:
    raise ConfigError("data", f"{path} is in a bucket, and gcsfs is missing.", "pip install -e '.[gcs]'")
  import fsspec
  from etils import epath

  # Others write to the bucket: a listing is old at once.
  fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
  return epath.Path(path)


def open_file(path: str) -> IO[bytes]:
  """Opens a file for reading, on a disk or in a bucket."""
  return place_of(path).open("rb")
