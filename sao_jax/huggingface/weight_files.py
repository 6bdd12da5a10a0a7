"""The files of a folder that hold its tensors: those that transformers would take, in its order."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from absl import logging

from sao_jax.errors import ConfigError
from sao_jax.huggingface.safetensors_file import StoredTensor, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_ADAPTER = "adapter_config.json"
_COPY_AGAIN = "Copy the folder again; `hf download` goes on where it has stopped."


def find_tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
  """Finds all tensors of a folder by name: those of the single file, or else those of all files that the index names.

  Raises:
    ConfigError: there is neither, a file is missing, broken or outside of the folder, a tensor is missing or in two
      files, or the folder has an adapter beside the model.
  """
  if (folder / _ADAPTER).is_file():
    raise ConfigError(
      "model.checkpoint",
      f"{folder} has an {_ADAPTER}: its model is that of the tensors with an adapter, which is not read.",
      "Merge them: merge_and_unload() of peft, then save_pretrained(FOLDER). Without the adapter, remove that file.",
    )
  single, index = folder / SINGLE, folder / INDEX
  if single.is_file():
    if index.is_file():
      logging.warning("%s is read. %s beside it is not: transformers does the same.", single, INDEX)
    return read_header(single)
  if index.is_file():
    return _tensors_of_index(index)
  others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".safetensors"))
  raise ConfigError(
    "model.checkpoint",
    f"{folder} holds neither {SINGLE} nor {INDEX}; pickled weights are never read."
    + (f" It holds {', '.join(others[:5])}{' and others' if len(others) > 5 else ''}." if others else ""),
    "Save it again: AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto').save_pretrained(NEW) of transformers.",
  )


def _tensors_of_index(index: pathlib.Path) -> dict[str, StoredTensor]:
  """Reads all files that an index names: all tensors in them, as transformers does, in whatever file each should be."""
  weight_map = read_object(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(x, str) for x in weight_map.values()):
    raise ConfigError("model.checkpoint", f"{index} has no weight_map from tensors to files.", _COPY_AGAIN)
  files = sorted(set(weight_map.values()))

  # An index comes with a download: it must not name files of this machine.
  outside = [file for file in files if pathlib.PurePath(file).is_absolute() or ".." in pathlib.PurePath(file).parts]
  if outside:
    raise ConfigError("model.checkpoint", f"{index} names {_listed(outside)}, outside of the folder.", _COPY_AGAIN)
  missing = [file for file in files if not (index.parent / file).is_file()]
  if missing:
    problem = f"{_listed(missing)} is missing in {index.parent}, {INDEX} names it."
    raise ConfigError("model.checkpoint", problem, _COPY_AGAIN)

  # Each tensor in one place, and all that are promised.
  tensors: dict[str, StoredTensor] = {}
  for file in files:
    for name, stored in read_header(index.parent / file).items():
      if name in tensors:
        raise ConfigError(
          "model.checkpoint",
          f"{name} is in {tensors[name].path} and in {stored.path}.",
          "Copy the folder again into a new one: files of two models are mixed.",
        )
      tensors[name] = stored
  lost = sorted(weight_map.keys() - tensors.keys())
  if lost:
    raise ConfigError("model.checkpoint", f"{_listed(lost)}: in none of the files that {index} names.", _COPY_AGAIN)
  return tensors


def read_object(path: pathlib.Path) -> dict[str, Any]:
  """Reads the object in a JSON file; {} for other JSON. ConfigError, naming the file, when it is none."""
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except (ValueError, RecursionError, OSError) as error:
    raise ConfigError("model.checkpoint", f"{path} is not JSON: {error}.", "Mend the file.") from error
  return content if isinstance(content, dict) else {}


def _listed(names: list[str]) -> str:
  return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
