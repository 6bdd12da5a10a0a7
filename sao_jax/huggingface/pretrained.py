"""Starting from a Hugging Face folder: it decides the shape, and the tokenizer if asked; the configuration the rest."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection
from typing import Any

from sao_jax.config import MODEL_CHECKPOINT, RunConfig
from sao_jax.configuration import config_tree
from sao_jax.errors import ConfigError
from sao_jax.huggingface.families.family import SHAPE
from sao_jax.huggingface.folder import HFFolder, is_hf_folder

BASE = "huggingface"  # in a directory of checkpoints: what of a converted folder is no parameter of ours


def base_folder(checkpoint: str) -> HFFolder | None:
  """The Hugging Face folder that `model.checkpoint` names, or what a converted one left beside the checkpoints."""
  for path in (pathlib.Path(checkpoint), pathlib.Path(checkpoint) / BASE):
    if checkpoint and is_hf_folder(path):
      return HFFolder(path)
  return None


def with_folder_shape(config: RunConfig, explicit: Collection[str] = ()) -> RunConfig:
  """`config` with the shape of the Hugging Face folder that model.checkpoint names; as it is when it names none.

  A `tokenizer_folder` of the environment that is MODEL_CHECKPOINT becomes that folder.

  Args:
    config: its dtypes, remat and the like stay.
    explicit: dotted names of the fields that were set for this run.

  Raises:
    ConfigError: the folder cannot be used, a field in `explicit` contradicts it, or a tokenizer is wanted from none.
  """
  base = base_folder(config.model.checkpoint)
  config = dataclasses.replace(config, environment=_with_tokenizer(config.environment, config.model.checkpoint, base))
  if base is None:
    return config
  model = base.model_config(config.model)
  for name in SHAPE:
    ours, theirs = getattr(config.model, name), getattr(model, name)
    if ours != theirs and any(f"{path}.".startswith(f"model.{name}.") for path in explicit):
      raise ConfigError(f"model.{name}", f"{ours} was set, {base.path} has {theirs}.", "Leave it to the folder.")
  return dataclasses.replace(config, model=model)


def _with_tokenizer(environment: Any, checkpoint: str, base: HFFolder | None) -> Any:
  """The environment's settings with the folder in place of MODEL_CHECKPOINT, also inside what wraps an environment."""
  fields = config_tree.leaves(environment) if config_tree.is_section(environment) else ()
  wanted = [path for path, value, _ in fields if f".{path}".endswith(".tokenizer_folder") and value == MODEL_CHECKPOINT]
  if not wanted:
    return environment
  if base is None:
    found = f"{checkpoint} is no Hugging Face folder" if checkpoint else "it is empty"
    raise ConfigError(
      MODEL_CHECKPOINT,
      f"{found}, and environment.{wanted[0]} takes the tokenizer from it.",
      "Pass a folder, as in --config.model.checkpoint=models/tiny, or name the tokenizer's in that field.",
    )
  return config_tree.replace(environment, dict.fromkeys(wanted, str(base.path)))
