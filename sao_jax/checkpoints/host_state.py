"""Host state in a checkpoint: nested dicts and lists of plain values and numpy arrays, stored without pickle.

Each process that samples writes one npz archive: the arrays, and a JSON document in which {"__array__": name} marks
their places. Where another number of them reads them, each gets all archives, as `Archives`, to take its share.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import zipfile
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from sao_jax.checkpoints.readable import Unreadable
from sao_jax.parallel.process import DataShare

_ARRAY = "__array__"
_DICT = "__dict__"  # a dict with one of these two keys, as a list of its items
_DOCUMENT = "json"


def encode(state: Any) -> bytes:
  """Returns the archive of `state`.

  Dicts with string keys, lists, None, bool, int, float, str and numpy arrays come back as they are, tuples as lists,
  numpy scalars as Python numbers.

  Raises:
    TypeError: `state` holds anything else; the error names the place.
  """
  arrays: dict[str, np.ndarray] = {}
  document = json.dumps(_encode(state, "host_state", arrays))
  buffer = io.BytesIO()
  np.savez(buffer, **{_DOCUMENT: np.frombuffer(document.encode(), np.uint8)}, **arrays)
  return buffer.getvalue()


def decode(archive: bytes) -> Any:
  """Returns the state that `encode` stored. Raises ValueError for anything that `encode` did not write."""
  try:
    with np.load(io.BytesIO(archive), allow_pickle=False) as file:
      return _decode(json.loads(file[_DOCUMENT].tobytes()), file)
  except (zipfile.BadZipFile, EOFError, KeyError) as error:
    raise ValueError(f"not a host state archive: {error}") from error


def _encode(value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
  # Plain values are JSON already.
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if isinstance(value, np.generic) and not value.dtype.hasobject:
    return value.item()

  # Arrays go to the archive; an array of objects would need pickle.
  if isinstance(value, np.ndarray) and not value.dtype.hasobject:
    name = f"array_{len(arrays)}"
    arrays[name] = value
    return {_ARRAY: name}

  # Containers; a dict with a key that marks something would come back as what that marks.
  if isinstance(value, list | tuple):
    return [_encode(item, f"{path}[{index}]", arrays) for index, item in enumerate(value)]
  if isinstance(value, dict):
    for key in value:
      if not isinstance(key, str):
        raise TypeError(f"{path}: the key {key!r} is not a string; JSON would change it")
    encoded = {key: _encode(item, f"{path}.{key}", arrays) for key, item in value.items()}
    return {_DICT: list(encoded.items())} if _ARRAY in value or _DICT in value else encoded
  raise TypeError(f"{path}: a {type(value).__name__} cannot be stored without pickle")


def _decode(value: Any, arrays: Any) -> Any:
  if isinstance(value, list):
    return [_decode(item, arrays) for item in value]
  if not isinstance(value, dict):
    return value
  if _ARRAY in value:
    return arrays[value[_ARRAY]]
  items = value[_DICT] if _DICT in value else value.items()
  return {key: _decode(item, arrays) for key, item in items}


class Archives(NamedTuple):
  """The host states of a checkpoint that was saved with another number of shares.

  Attributes:
    states: those of all shares, in order.
  """

  states: list[Any]


class HostStateHandler(ocp.AsyncCheckpointHandler):
  """Lets Orbax write the archive of a host state as one item of its atomic checkpoint."""

  async def async_save(self, directory: pathlib.Path, args: HostStateSave) -> list[future.Future]:
    """Writes the archive in the background."""

    async def write() -> None:
      self._write(directory, args)

    return [future.CommitFutureAwaitingContractedSignals(write(), name="host_state")]

  def save(self, directory: pathlib.Path, args: HostStateSave) -> None:
    """Writes the archive before it returns."""
    self._write(directory, args)

  def restore(self, directory: pathlib.Path, args: HostStateRestore | None = None) -> Any:
    """Reads the archive of this process's share; all of them, see `Archives`, if there were more or fewer shares.

    A process without a share reads the first one. Returns `Unreadable` instead of raising an error.
    """
    share = args.share if args is not None and args.share is not None else _of_all()
    try:
      return self._read(directory, share)
    except (OSError, ValueError) as error:
      return Unreadable(error)

  def _write(self, directory: pathlib.Path, args: HostStateSave) -> None:
    share = args.share or _of_all()
    if share.brings:
      _path(directory, share.index).write_bytes(args.archive)

  def _read(self, directory: pathlib.Path, share: DataShare) -> Any:
    saved = sorted(directory.glob("process_*.npz"), key=lambda path: int(path.stem.rpartition("_")[2]))
    if saved and len(saved) != share.count:
      return Archives([decode(path.read_bytes()) for path in saved])
    return decode(_path(directory, share.index or 0).read_bytes())


def _of_all() -> DataShare:
  """Every process has a share."""
  return DataShare(jax.process_index(), jax.process_count())


def _path(directory: pathlib.Path, index: int) -> pathlib.Path:
  return directory / f"process_{index}.npz"


@ocp.args.register_with_handler(HostStateHandler, for_save=True)
@dataclasses.dataclass
class HostStateSave(ocp.args.CheckpointArgs):
  """The archive to save, which `encode` made before the host goes on to change its state.

  A process without a share saves none; without `share` every process has one.
  """

  archive: bytes
  share: DataShare | None = None


@ocp.args.register_with_handler(HostStateHandler, for_restore=True)
@dataclasses.dataclass
class HostStateRestore(ocp.args.CheckpointArgs):
  """The share to read; None: every process has one."""

  share: DataShare | None = None
