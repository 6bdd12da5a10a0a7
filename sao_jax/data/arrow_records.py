"""Records of parquet files, and of the Arrow files that `datasets` saves, by number; needs pyarrow (extra `data`)."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Sequence
from typing import Any

from sao_jax.data.parts import ends_of, locate, total
from sao_jax.data.places import BUCKET, open_file
from sao_jax.errors import ConfigError

KEPT_BYTES = 2**28  # of row groups that stay decoded; one more than that stays alone


class ParquetRecords(Sequence[dict[str, Any]]):
  """The rows of a parquet file. A row group is decoded when one of its rows is wanted, and the latest ones are kept."""

  def __init__(self, path: str | os.PathLike[str], columns: Sequence[str]):
    """Reads the footer of the file alone.

    Args:
      path: the file, which may lie in a bucket (gs://).
      columns: names of the columns that records have; others are never decoded.

    Raises:
      ConfigError: there is no such file, it is damaged, it lacks a column, or pyarrow is missing.
    """
    pyarrow = _pyarrow()
    self.path, self._columns = os.fspath(path), list(columns)
    try:
      self._file = pyarrow.parquet.ParquetFile(open_file(self.path))
    except (OSError, pyarrow.ArrowException) as error:
      raise ConfigError("data", f"Cannot read {self.path}: {error}.", "Name a parquet file.") from error
    _check_columns(self.path, self._file.schema_arrow.names, columns)

    # Row i lies in the first group whose end is above i.
    metadata = self._file.metadata
    self._ends = ends_of(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    self._kept: collections.OrderedDict[int, Any] = collections.OrderedDict()
    self._lock = threading.Lock()  # an evaluation reads in a thread of its own

  def __len__(self) -> int:
    return total(self._ends)

  def __getitem__(self, index: int) -> dict[str, Any]:
    group, row = locate(self._ends, index)
    with self._lock:
      table = self._group(group)
    return table.slice(row, 1).to_pylist()[0]

  def place(self, index: int) -> str:
    """Returns the file and the row of a record, for messages."""
    return f"{self.path}, row {index}"

  def _group(self, group: int) -> Any:
    """Returns a row group, decoded; those that were used longest ago make room for it."""
    if group not in self._kept:
      self._kept[group] = self._file.read_row_group(group, columns=self._columns)
      while len(self._kept) > 1 and sum(table.nbytes for table in self._kept.values()) > KEPT_BYTES:
        self._kept.popitem(last=False)
    self._kept.move_to_end(group)
    return self._kept[group]


class ArrowRecords(Sequence[dict[str, Any]]):
  """The rows of one Arrow file, as `datasets.Dataset.save_to_disk` writes them; mapped into memory, not read."""

  def __init__(self, path: str | os.PathLike[str], columns: Sequence[str]):
    """Maps the file, and reads the heads of its batches.

    Args:
      path: the file, on a disk.
      columns: names of the columns that records have.

    Raises:
      ConfigError: there is no such file on a disk, it is damaged, it lacks a column, or pyarrow is missing.
    """
    pyarrow = _pyarrow()
    self.path = os.path.expanduser(path)
    if self.path.startswith(BUCKET):
      remedy = "Copy the folder to a disk, or save it as parquet."
      raise ConfigError("data", f"{self.path} lies in a bucket, where no file can be mapped into memory.", remedy)
    try:
      stream = pyarrow.ipc.open_stream(pyarrow.memory_map(self.path))
      _check_columns(self.path, stream.schema.names, columns)
      self._batches = [batch.select(list(columns)) for batch in stream]
    except (OSError, pyarrow.ArrowException) as error:
      remedy = "Save the data set again, with save_to_disk."
      raise ConfigError("data", f"Cannot read {self.path}: {error}.", remedy) from error
    self._ends = ends_of(batch.num_rows for batch in self._batches)

  def __len__(self) -> int:
    return total(self._ends)

  def __getitem__(self, index: int) -> dict[str, Any]:
    batch, row = locate(self._ends, index)
    return self._batches[batch].slice(row, 1).to_pylist()[0]

  def place(self, index: int) -> str:
    """Returns the file and the row of a record, for messages."""
    return f"{self.path}, row {index}"


def _check_columns(path: str, known: Sequence[str], columns: Sequence[str]) -> None:
  missing = sorted(set(columns) - set(known))
  if missing:
    raise ConfigError("data", f"{path} has no column {missing}.", f"Choose among {sorted(known)}.")


def _pyarrow() -> Any:
  """Imports pyarrow.

  Raises:
    ConfigError: it is not installed.
  """
  try:
    import pyarrow.ipc
    import pyarrow.parquet
  except ImportError as error:
    remedy = "Install it with: pip install 'sao_jax[data]', or write JSON lines."
    raise ConfigError("data", "Parquet and Arrow files need the package pyarrow.", remedy) from error
  return pyarrow
