"""Start of a run from a Hugging Face folder.

The folder decides the model's shape and, if asked, the tokenizer; the configuration decides everything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from sao_jax.config import MODEL_CHECKPOINT, RunConfig
from sao_jax.configuration import config_tree
from sao_jax.configuration.paths import check_readable, in_bucket, located
from sao_jax.errors import ConfigError
from sao_jax.huggingface.families.family import SHAPE
from sao_jax.huggingface.folder import HFFolder, is_hf_folder
from sao_jax.missing_folder import folder_error

# The subfolder of a converted checkpoint with the Hugging Face files that are not parameters of ours: config.json,
# tokenizer, tensors of multi-token prediction.
HF_SUBFOLDER = "huggingface"


def base_folder(checkpoint: str) -> HFFolder | None:
  """Opens the Hugging Face folder at `checkpoint`, or the one kept inside a converted checkpoint; None without any."""
  if in_bucket(checkpoint):
    check_readable(located(checkpoint), "model.checkpoint")
  for path in (located(checkpoint), located(checkpoint) / HF_SUBFOLDER):
    if checkpoint and is_hf_folder(path):
      return HFFolder(path)
  return None


def with_folder_shape(config: RunConfig, explicit: Collection[str] = ()) -> RunConfig:
  """Returns `config` with the shape of the Hugging Face folder that model.checkpoint names; unchanged without a folder.

  A `tokenizer_folder` of the environment that is MODEL_CHECKPOINT becomes that folder.

  Args:
    config: the run's configuration; its dtypes, remat and other choices of a run stay.
    explicit: dotted names of the fields that were set for this run.

  Raises:
    ConfigError: the folder cannot be used, a field in `explicit` contradicts it, or the environment wants its tokenizer
      although model.checkpoint names no folder.
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


def _with_tokenizer(environment: Any, checkpoint: str, base: HFFolder | None, path: str = "environment") -> Any:
  """Puts the folder in place of MODEL_CHECKPOINT in the environment's settings, inside wrappers and mixtures too."""
  if isinstance(environment, tuple):  # the parts of a mixture
    return tuple(_with_tokenizer(each, checkpoint, base, f"{path}.{index}") for index, each in enumerate(environment))
  if not config_tree.is_section(environment):
    return environment
  changes = {}
  for name in config_tree.annotations(environment):
    before = getattr(environment, name)
    if name == "tokenizer_folder" and before == MODEL_CHECKPOINT:
      changes[name] = _tokenizer_folder(checkpoint, base, f"{path}.{name}")
    elif (now := _with_tokenizer(before, checkpoint, base, f"{path}.{name}")) != before:
      changes[name] = now
  return dataclasses.replace(environment, **changes) if changes else environment


def _tokenizer_folder(checkpoint: str, base: HFFolder | None, path: str) -> str:
  """Returns the folder that a field which is MODEL_CHECKPOINT means."""
  if base is None:
    found = f"{checkpoint} is no Hugging Face folder" if checkpoint else "it is empty"
    problem = f"{found}, and {path} takes the tokenizer from it."
    remedy = "Pass a folder, as in --config.model.checkpoint=models/tiny, or name the tokenizer's in that field."
    raise folder_error(MODEL_CHECKPOINT, checkpoint, problem, remedy)
  return str(base.path)
