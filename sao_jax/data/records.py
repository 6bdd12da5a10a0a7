"""Records of data sets on a disk or in a bucket, by number: JSON lines, parquet, CSV, and what `datasets` saves.

    questions.jsonl, .parquet, .csv           one file
    folder/train-00000-of-00002.parquet ...   a folder of such files, as data sets are published; a split by its name
    folder/dataset_dict.json, .../state.json  what `save_to_disk` of the package `datasets` writes

No file is read whole, and JSON lines need no package.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.data.arrow_records import ArrowRecords, ParquetRecords
from sao_jax.data.csv_records import CSVRecords
from sao_jax.data.json_lines import JSONLines
from sao_jax.data.parts import ends_of, locate, total
from sao_jax.data.places import place_of
from sao_jax.data.tfds_source import json_value
from sao_jax.episode import BadPrompt, Prompt, PromptKey
from sao_jax.errors import ConfigError

JSON_LINES, PARQUET, CSV = (".jsonl", ".ndjson"), (".parquet",), (".csv",)
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")  # names that files of a split begin with


class RecordPrompts(Sequence[Prompt]):
  """Random access (`len`, `[index]`) to the records of a data set as prompts.

  >>> import tempfile
  >>> file = pathlib.Path(tempfile.mkdtemp(), "sums.jsonl")
  >>> _ = file.write_text('{"problem": "3+4", "meta": {"value": 7}}\\n')
  >>> prompts = RecordPrompts(file, environment="sums", fields={"question": "problem", "answer": "meta.value"})
  >>> prompts[0]
  Prompt(key=PromptKey(environment='sums', id=0, epoch=0), data={'question': '3+4', 'answer': 7})
  """

  def __init__(self, path: str | os.PathLike[str], *, environment: str, fields: Mapping[str, str], split: str = ""):
    """Opens the data set.

    Args:
      path: a file or a folder, see the head of this module; gs:// for one in a bucket.
      environment: name for the prompt keys.
      fields: key in `Prompt.data` -> field of the record; "reward_model.ground_truth" is a field within a field.
      split: of a folder that has several.

    Raises:
      ConfigError: there is no such data set, split or column, or a package is missing.
    """
    self._environment, self._fields = environment, dict(fields)
    columns = sorted({field.partition(".")[0] for field in self._fields.values()})
    self._parts = [_open(file, columns) for file in _files(os.fspath(path), split)]
    self._ends = ends_of(map(len, self._parts))

  def __len__(self) -> int:
    return total(self._ends)

  def __getitem__(self, index: int) -> Prompt:
    """Reads one prompt.

    Raises:
      BadPrompt: the record is damaged, or lacks a field; it names the file and the line.
    """
    part, row = locate(self._ends, index)
    records = self._parts[part]
    record = records[row]
    data = {key: json_value(_field(record, field, records.place(row))) for key, field in self._fields.items()}
    return Prompt(PromptKey(self._environment, int(index), 0), data)


def _field(record: Mapping[str, Any], field: str, place: str) -> Any:
  """Returns a field of a record, by its dotted name.

  Raises:
    BadPrompt: there is none.
  """
  value: Any = record
  for name in field.split("."):
    if not isinstance(value, Mapping) or value.get(name) is None:
      known = sorted(map(str, value)) if isinstance(value, Mapping) else []
      remedy = f"Name fields that all records have, such as {known}"
      raise BadPrompt("data", f"{place} has no field {field!r}", remedy, reason="prompt_damaged")
    value = value[name]
  return value


def _open(file: str, columns: Sequence[str]) -> JSONLines | CSVRecords | ParquetRecords | ArrowRecords:
  """Opens one file by its kind."""
  if file.endswith(JSON_LINES):
    return JSONLines(file)
  if file.endswith(CSV):
    return CSVRecords(file, columns)
  return ParquetRecords(file, columns) if file.endswith(PARQUET) else ArrowRecords(file, columns)


def _files(path: str, split: str) -> list[str]:
  """Lists the files of a data set, in order.

  Raises:
    ConfigError: there are none, or the split does not say which of them.
  """
  place = place_of(path)
  if not place.is_dir():
    kinds = (*JSON_LINES, *PARQUET, *CSV)
    if not path.endswith(kinds):
      remedy = f"Name a file ({', '.join(kinds)}), a folder of them, or one that datasets.save_to_disk has written."
      problem = "is no kind of file that can be read" if place.exists() else "is not there"
      raise ConfigError("data", f"{path} {problem}.", remedy)
    if split:
      raise ConfigError("data", f"{path} is one file, of which {split!r} is no split.", "Leave the split empty.")
    return [path]

  # A data set that was saved, or several by split.
  if (place / "dataset_dict.json").exists():
    known = json.loads((place / "dataset_dict.json").read_text())["splits"]
    if split not in known:
      raise ConfigError("data", f"{path} has no split {split!r}.", f"Choose among {known}.")
    return _saved(place / split)
  if (place / "state.json").exists():
    if split:
      raise ConfigError("data", f"{path} is one split, of which {split!r} is none.", "Leave the split empty.")
    return _saved(place)
  return _published(place, split)


def _saved(folder: pathlib.Path) -> list[str]:
  """Lists the files of one data set that `save_to_disk` has written."""
  state = json.loads((folder / "state.json").read_text())
  if state.get("_indices_data_files"):
    raise ConfigError("data", f"{folder} holds its rows in another order.", "Save it again: flatten_indices() first.")
  return [os.fspath(folder / file["filename"]) for file in state["_data_files"]]


def _published(folder: pathlib.Path, split: str) -> list[str]:
  """Lists the files of a folder of one kind, those whose names begin with the split, if there is one."""
  # A table beside JSON lines or parquet tells of them, or holds the same records.
  named = lambda kinds: sorted(file for file in folder.iterdir() if file.name.endswith(kinds))
  files = named((*JSON_LINES, *PARQUET)) or named(CSV)
  begins = {file: re.split(r"[-._]", file.name)[0] for file in files}
  chosen = [file for file in files if split in ("", begins[file])]
  remedy = "Name one of its files, or a split: the files of split train begin with train."
  if not chosen:
    raise ConfigError("data", f"{folder} has no files of {f'split {split!r}' if split else 'records'}.", remedy)

  # Whoever trains on everything in a folder may train on its test split.
  splits = sorted({begins[file] for file in chosen} & set(SPLITS))
  if len(splits) > 1:
    raise ConfigError("data", f"{folder} has the splits {splits}.", remedy)
  if len({file.suffix in PARQUET for file in chosen}) > 1:
    raise ConfigError("data", f"{folder} has JSON lines and parquet files, perhaps of the same records.", remedy)
  return [os.fspath(file) for file in chosen]
