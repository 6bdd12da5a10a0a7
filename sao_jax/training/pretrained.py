"""Starting from a Hugging Face folder: the folder decides the model's shape, the configuration all else."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection

from sao_jax.config import RunConfig
from sao_jax.errors import ConfigError
from sao_jax.models.families.family import SHAPE
from sao_jax.models.hf_folder import HFFolder, is_hf_folder

BASE = "huggingface"  # in a directory of checkpoints: what of a converted folder is no parameter of ours


def base_folder(checkpoint: str) -> HFFolder | None:
  """The Hugging Face folder that `model.checkpoint` names, or what a converted one left beside the checkpoints."""
  for path in (pathlib.Path(checkpoint), pathlib.Path(checkpoint) / BASE):
    if checkpoint and is_hf_folder(path):
      return HFFolder(path)
  return None


def with_folder_shape(config: RunConfig, explicit: Collection[str] = ()) -> RunConfig:
  """`config` with the shape of the Hugging Face folder that model.checkpoint names; as it is when it names none.

  Args:
    config: its dtypes, remat and the like stay.
    explicit: dotted names of the fields that were set for this run.

  Raises:
    ConfigError: the folder cannot be used, or a field in `explicit` contradicts it.
  """
  base = base_folder(config.model.checkpoint)
  if base is None:
    return config
  model = base.model_config(config.model)
  for name in SHAPE:
    ours, theirs = getattr(config.model, name), getattr(model, name)
    if ours != theirs and any(f"{path}.".startswith(f"model.{name}.") for path in explicit):
      raise ConfigError(f"model.{name}", f"{ours} was set, {base.path} has {theirs}.", "Leave it to the folder.")
  return dataclasses.replace(config, model=model)
