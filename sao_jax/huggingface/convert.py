"""Hugging Face folders to checkpoints of ours, and back."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from absl import logging

from sao_jax.checkpoints.checkpointer import Checkpointer, load_params
from sao_jax.checkpoints.state_tree import check_same_leaves, flatten
from sao_jax.config import ModelConfig
from sao_jax.configuration import config_tree
from sao_jax.errors import ConfigError
from sao_jax.huggingface.folder import CONFIG, SINGLE, HFFolder
from sao_jax.huggingface.load import import_policy
from sao_jax.huggingface.pretrained import BASE, base_folder
from sao_jax.huggingface.safetensors_file import write_file
from sao_jax.huggingface.save import TOKENIZER_FILES, beyond_trunk, export_critic, export_policy
from sao_jax.models.critic import critic_specs
from sao_jax.models.lora import merge_lora
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import abstract_params

RUN_CONFIG = "config.json"  # in a workdir


def to_checkpoint(folder: str | os.PathLike, directory: str | os.PathLike, *, dtype: str = "float32") -> ModelConfig:
  """Writes `directory`, for `model.checkpoint`, from a Hugging Face folder; parameters are kept in `dtype`.

  What of the folder is no parameter of ours (config.json, tokenizer, tensors beyond the policy) goes along.

  Raises:
    ConfigError: the folder cannot be read, or `directory` holds something.
  """
  source, target = HFFolder(folder), pathlib.Path(directory)
  if target.is_dir() and any(target.iterdir()):
    raise ConfigError("--output", f"{target} is not empty.", "Name a new directory.")
  model = source.model_config(ModelConfig(param_dtype=dtype))
  params = import_policy(folder, model)
  unfinished = target.with_name(f"{target.name}.unfinished")
  shutil.rmtree(unfinished, ignore_errors=True)
  with Checkpointer(unfinished) as checkpointer:
    checkpointer.save(0, {"params": params})
  base = unfinished / BASE
  base.mkdir()
  for name in (CONFIG, *TOKENIZER_FILES):
    if (source.path / name).is_file():
      shutil.copyfile(source.path / name, base / name)
  write_file(base / SINGLE, list(beyond_trunk(source)))
  os.replace(unfinished, target)  # whole or not at all
  return model


def to_hf(
  checkpoint: str | os.PathLike,
  directory: str | os.PathLike,
  *,
  base: str | os.PathLike | None = None,
  network: str = "policy",
  dtype: str | None = None,
  step: int | None = None,
) -> None:
  """Writes a Hugging Face folder from a directory of checkpoints, for example runs/a/train.

  Args:
    checkpoint: of a run's phase, or what `to_checkpoint` wrote.
    directory: the folder to write.
    base: the folder that the model started from; by default the one that came with the checkpoints, or that the run's
      configuration names, if any.
    network: "policy" or "critic".
    dtype: of the weights, None: as they are stored.
    step: which checkpoint, None: the newest.

  Raises:
    ConfigError: nothing says which shape the model has, or the checkpoint is of another one.
  """
  checkpoint = pathlib.Path(checkpoint)
  run = _model_of_run(checkpoint.parent / RUN_CONFIG)
  places = [str(base)] if base else [str(checkpoint), run.checkpoint if run else ""]
  source = next(filter(None, map(base_folder, places)), None)
  if base and source is None:
    raise ConfigError("--base", f"{base} is no Hugging Face folder.", "Name the one that the model started from.")
  if source is None and run is None:
    raise ConfigError("--checkpoint", f"nothing tells the model's shape in {checkpoint}.", "Pass --base.")
  model = source.model_config() if source else run
  params = load_params(checkpoint, network, step=step)
  if "lora" in params:
    params = jax.jit(functools.partial(merge_lora, keep_dtype=True))(params)
  specs = param_specs(model) if network == "policy" else critic_specs(model, params["value_head"].shape[-1])
  check_same_leaves(flatten(params), flatten(abstract_params(specs)), network, str(checkpoint), same_dtype=False)
  logging.info("Exporting the %s in %s%s.", network, checkpoint, f", as {source.path}" if source else "")
  if source is None:
    logging.warning(
      "%s holds neither a tokenizer nor tensors of multi-token prediction, and a new config.json: no Hugging Face "
      "folder is known that the model started from%s. If there is one, name it with --base.",
      directory,
      f" ({run.checkpoint} is not there)" if run.checkpoint and not pathlib.Path(run.checkpoint).exists() else "",
    )
  export = export_policy if network == "policy" else export_critic
  export(jax.block_until_ready(params), model, directory, base=source, dtype=dtype)


def _model_of_run(path: pathlib.Path) -> ModelConfig | None:
  """The model's configuration that a run recorded in its workdir; None without one."""
  if not path.is_file():
    return None
  recorded = json.loads(path.read_text(encoding="utf-8")).get("model", {})
  return config_tree.replace(ModelConfig(), dict(_leaves(recorded)))


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  for name, value in section.items():
    if isinstance(value, Mapping):
      yield from _leaves(value, f"{prefix}{name}.")
    elif name != config_tree.TYPE_KEY:
      yield f"{prefix}{name}", value
