"""Records of any data set as tasks of agents: the fields that are named, whatever they hold."""

from __future__ import annotations

import array
import dataclasses
import functools
import json
from collections.abc import Sequence

from sao_jax.data.prompts import check_split, split_of
from sao_jax.data.records import RecordPrompts
from sao_jax.data.tokenizer import Tokenizer
from sao_jax.episode import BadPrompt, Prompt
from sao_jax.errors import ConfigError
from sao_jax.settings import Reopened


@dataclasses.dataclass(frozen=True)
class TaskRecords(Reopened):
  """Settings: the data set, and the fields that an agent is given."""

  data: str  # a file or folder (sao_jax/data/records.py), gs:// too
  fields: tuple[str, ...]  # of the records; a dot leads into a field, and the whole is its name in the task
  split: str = ""  # of data that has several
  heldout_data: str = ""  # a data set of its own for evaluation; "": of `data`
  heldout_split: str = ""  # its split; without either, a tenth of all records is held out, by their hash

  def __post_init__(self):
    if not self.fields or isinstance(self.fields, str):
      raise ConfigError("environment.tasks.fields", f"{self.fields!r} names no field.", "Use a tuple of names.")

  @functools.cached_property
  def _splits(self) -> dict[str, Sequence[Prompt]]:
    source = self._open(self.data, self.split)
    if self.heldout_data or self.heldout_split:
      return {"train": source, "heldout": self._open(self.heldout_data or self.data, self.heldout_split)}
    chosen = {split: array.array("Q") for split in ("train", "heldout")}
    for index in range(len(source)):
      chosen[_split_of(source, index)].append(index)
    return {split: _Chosen(source, indices) for split, indices in chosen.items()}

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    """Gives random access to the tasks of a split, see `EnvironmentSpec.prompts`."""
    return self._splits[check_split(split)]

  def _open(self, data: str, split: str) -> RecordPrompts:
    return RecordPrompts(data, environment="tasks", fields={field: field for field in self.fields}, split=split)


def _split_of(source: Sequence[Prompt], index: int) -> str:
  """Returns the split of a record by its hash. One that is damaged is trained on, where it is skipped and counted."""
  try:
    return split_of(json.dumps(source[index].data, sort_keys=True))
  except BadPrompt:
    return "train"


class _Chosen(Sequence[Prompt]):
  """Some of the prompts of a source."""

  def __init__(self, source: Sequence[Prompt], chosen: Sequence[int]):
    self._source, self._chosen = source, chosen

  def __len__(self) -> int:
    return len(self._chosen)

  def __getitem__(self, index: int) -> Prompt:
    return self._source[int(self._chosen[index])]
