"""The error for a name that should be a model's folder and is none: it says how to get the folder."""

from __future__ import annotations

import difflib
import os
import pathlib
import re

from sao_jax.errors import ConfigError

_OF_HUB = re.compile(r"(?:https?:/+(?:www\.)?huggingface\.co/|hf:/+)?([\w.-]+/[\w.-]+?)(?:/?|/(?:tree|blob)/.*)")
_FETCH = "`pip install huggingface_hub`, `hf download {name} --local-dir {folder}`"


def folder_error(field: str, path: str | os.PathLike, problem: str, remedy: str) -> ConfigError:
  """Returns the error for a folder that cannot be used, with what else `path` tells.

  Args:
    field: the field or flag that names the folder.
    path: the folder as it was given, or made absolute.
    problem: a sentence.
    remedy: a sentence for a folder that is there.
  """
  folder = pathlib.Path(os.path.expanduser(path)).absolute()
  if os.fspath(path).startswith("gs://") or folder == pathlib.Path.cwd():
    return ConfigError(field, problem, remedy)
  if not os.path.exists(folder):  # unlike pathlib, whatever the system says of the name
    return ConfigError(field, f"{problem} There is no such folder.", " ".join([*_ways_to(path, folder), remedy]))
  if not os.path.isdir(folder):
    return ConfigError(field, f"{problem} It is a file.", f"Name the folder that it is in, {folder.parent}. {remedy}")

  # Folders that other programs make.
  snapshots = sorted(folder.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime)
  if snapshots:
    return ConfigError(field, f"{problem} It is a cache of huggingface_hub.", f"Name {snapshots[-1].parent} in it.")
  if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
    merge = "Merge it into its model: merge_and_unload() of peft, then save_pretrained(FOLDER)."
    return ConfigError(field, f"{problem} It is an adapter without its model.", merge)
  if any(folder.glob("*.gguf")):
    return ConfigError(field, f"{problem} GGUF files are not read.", "Fetch the folder that they were made from.")
  return ConfigError(field, problem, remedy)


def _ways_to(path: str | os.PathLike, folder: pathlib.Path) -> list[str]:
  """Sentences that lead to a folder that is not there: names that look alike, and a download."""
  there = next(parent for parent in folder.parents if os.path.isdir(parent))
  wanted, *rest = folder.relative_to(there).parts
  try:
    names = {entry.name.lower(): entry.name for entry in there.iterdir() if entry.is_dir()}
  except OSError:  # a folder that may be entered, but not listed
    names = {}
  alike = [there / names[name] for name in difflib.get_close_matches(wanted.lower(), names)]
  ways = [f"Did you mean {' or '.join(_shown(each.joinpath(*rest)) for each in alike)}?"] if alike else []

  # A name on the hub, unless its first part is a folder here.
  given = _shown(folder)
  found = _OF_HUB.fullmatch(os.fspath(path)) or _OF_HUB.fullmatch(given)
  if found and there != folder.parent:
    name = found[1]
    target = f"models/{name.rpartition('/')[2]}"
    fetch = _FETCH.format(name=name, folder=target)
    return [*ways, f"If {name} is a model on the Hugging Face Hub: {fetch}, then name {target}."]
  return [*ways, f"To fetch a model of the Hugging Face Hub: {_FETCH.format(name='OWNER/NAME', folder=given)}."]


def _shown(folder: pathlib.Path) -> str:
  """Shows a folder as people write it: relative to the current one where it is inside of it."""
  current = pathlib.Path.cwd()
  return os.fspath(folder.relative_to(current) if folder.is_relative_to(current) else folder)
