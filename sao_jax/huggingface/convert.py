"""Conversion of Hugging Face folders to checkpoints of ours, and back."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh, Sharding

from sao_jax.checkpoints.checkpointer import Checkpointer, load_params
from sao_jax.checkpoints.state_tree import check_same_leaves, flatten
from sao_jax.config import MeshConfig, ModelConfig
from sao_jax.configuration import config_tree
from sao_jax.configuration.output_folder import UNFINISHED, check_output_folder, whole_folder
from sao_jax.configuration.paths import check_storable, expand, in_bucket, located
from sao_jax.errors import ConfigError
from sao_jax.huggingface.carried_files import carry_files
from sao_jax.huggingface.folder import CONFIG, HFFolder
from sao_jax.huggingface.load import import_policy
from sao_jax.huggingface.pretrained import HF_SUBFOLDER, base_folder
from sao_jax.huggingface.safetensors_file import write_file
from sao_jax.huggingface.save import check_export_folder, copied_tensors, export_critic, export_policy
from sao_jax.huggingface.weight_files import SINGLE
from sao_jax.missing_folder import folder_error
from sao_jax.models.critic import critic_specs
from sao_jax.models.critic_lora import join_base
from sao_jax.models.lora import merge_lora
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.agreement import all_processes
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.mesh import check_mesh_divides_model, make_mesh
from sao_jax.parallel.params import Params, abstract_params

RUN_CONFIG = "config.json"  # the file in a workdir that holds the run's configuration


def to_checkpoint(folder: str | os.PathLike, directory: str | os.PathLike, *, dtype: str = "float32") -> ModelConfig:
  """Converts a Hugging Face folder to a checkpoint, for `model.checkpoint`; returns the model's configuration.

  Everything that is no parameter of ours (config.json, tokenizer, tensors beyond the policy) is copied to a subfolder,
  so that `to_hf` can restore it.

  Args:
    folder: the Hugging Face folder.
    directory: the directory of checkpoints to write, new or empty; the checkpoint in it appears when it is complete.
    dtype: the dtype of the parameters in the checkpoint.

  Raises:
    ConfigError: the folder cannot be read, or `directory` is not empty.

  >>> import tempfile
  >>> from sao_jax.parallel.params import init_params
  >>> config = ModelConfig(vocab_size=8, num_layers=1, d_model=4, num_heads=1, num_kv_heads=1, head_dim=4, d_ff=4)
  >>> with tempfile.TemporaryDirectory() as workdir:
  ...   folder, checkpoint, back = (pathlib.Path(workdir, name) for name in ("tiny", "checkpoint", "back"))
  ...   export_policy(init_params(param_specs(config), jax.random.key(0)), config, folder)
  ...   model = to_checkpoint(folder, checkpoint)
  ...   to_hf(checkpoint, back)
  ...   HFFolder(back).model_config() == model == config
  True
  """
  source, target, processes = HFFolder(folder), expand(directory), all_processes()
  check_storable(target, "--output")
  _agree_on(lambda: _check_new_checkpoints(target))
  model = source.model_config(ModelConfig(param_dtype=dtype))
  with processes.busy():
    params = import_policy(folder, model, _mesh_of_all())

  # In a bucket, where nothing can be renamed, the checkpoint comes last, and is whole or none.
  inside = target if in_bucket(target) else target / UNFINISHED
  with whole_folder(target, last="0") if processes.is_writer else contextlib.nullcontext(inside) as unfinished:
    base = unfinished / HF_SUBFOLDER
    if processes.is_writer:
      base.mkdir(parents=True)
      carry_files(source.path, base)
      (base / CONFIG).write_bytes((source.path / CONFIG).read_bytes())
      write_file(base / SINGLE, list(copied_tensors(source)))
    processes.gather("what is no parameter of ours is written", True)

    # A checkpoint of step 0 with the policy alone.
    with Checkpointer(unfinished) as checkpointer:
      checkpointer.save(0, {"params": params})
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
  """Converts a checkpoint to a Hugging Face folder; an example is in `to_checkpoint`.

  Args:
    checkpoint: a directory of checkpoints: that of a run's phase (runs/a/train), or one that `to_checkpoint` wrote.
    directory: the folder to write.
    base: the folder that the model started from. Default: the one that `to_checkpoint` kept beside the checkpoints, or
      the one that the run's configuration names, if any.
    network: "policy" or "critic".
    dtype: the dtype of the weights in the folder; None keeps that of the checkpoint.
    step: the step of the checkpoint; None takes the newest.

  Raises:
    ConfigError: no folder and no configuration gives the model's shape, or the checkpoint has another one.
  """
  # The shape comes from the folder that the model started from, or else from the configuration of the run.
  checkpoint, directory = expand(checkpoint), expand(directory)
  _agree_on(lambda: check_export_folder(directory, "--output"))
  run = _model_of_run(checkpoint.parent / RUN_CONFIG)
  places = [str(base)] if base else [str(checkpoint), run.checkpoint if run else ""]
  source = next(filter(None, map(base_folder, places)), None)
  if base and source is None:
    raise folder_error(
      "--base", base, f"{base} is no Hugging Face folder.", "Name the one that the model started from."
    )
  if source is None and run is None:
    raise ConfigError("--checkpoint", f"nothing tells the model's shape in {checkpoint}.", "Pass --base.")
  model = source.model_config() if source else run

  # Parameters in the shape that they declare. A critic may lack its base, which then is the policy's; factors of LoRA
  # are merged.
  mesh = _mesh_of_all()

  def load(name: str) -> Params:
    return load_params(checkpoint, name, step=step, shardings=None if mesh is None else _shardings(model, name, mesh))

  params = load(network)
  if "lora" in params and "embed" not in params:
    params = join_base(params, load("policy"))
  if "lora" in params:
    params = jax.jit(functools.partial(merge_lora, keep_dtype=True))(params)
  if network == "policy":
    specs = param_specs(model)
  else:
    specs = critic_specs(model, params["value_head"].shape[-1], reads_logprobs="logprob_embed" in params)
  check_same_leaves(flatten(params), flatten(abstract_params(specs)), network, str(checkpoint), same_dtype=False)

  logging.info("Exporting the %s in %s%s.", network, checkpoint, f", as {source.path}" if source else "")
  if source is None:
    logging.warning(
      "%s holds neither a tokenizer nor tensors of multi-token prediction, and a new config.json: no Hugging Face "
      "folder is known that the model started from%s. If there is one, name it with --base.",
      directory,
      f" ({run.checkpoint} is not there)" if run.checkpoint and not located(run.checkpoint).exists() else "",
    )
  export = export_policy if network == "policy" else export_critic
  export(jax.block_until_ready(params), model, directory, base=source, dtype=dtype)


def _check_new_checkpoints(target: pathlib.Path) -> None:
  check_output_folder(target, "--output")
  if in_bucket(target) and target.is_dir() and any(target.iterdir()):
    raise ConfigError("--output", f"{target} is not empty.", "Name a new directory.")


def _agree_on(check: Callable[[], None]) -> None:
  """Has the first of all processes check the folder that it writes to; where it refuses, all of them end."""
  processes, refused = all_processes(), None
  if processes.is_writer:
    try:
      check()
    except ConfigError as error:
      refused = error
  if processes.any("a folder that cannot be written", refused is not None):
    raise refused or ConfigError("--output", "the first process refuses it.", "See its message.")


def _mesh_of_all() -> Mesh | None:
  """The devices of all processes, over which a model is spread that one of them could not hold; None for one alone."""
  return make_mesh(MeshConfig(fsdp=-1), tuple(jax.devices())) if all_processes().count > 1 else None


def _shardings(model: ModelConfig, network: str, mesh: Mesh) -> Callable[[str], Sharding]:
  """Returns the sharding of a parameter by its name: that which its axes have on the mesh."""
  layout = Layout(mesh)
  specs = param_specs(model) if network == "policy" else critic_specs(model)
  check_mesh_divides_model(layout, specs)
  known = flatten(layout.param_shardings(specs))
  return lambda name: known.get(name, layout.sharding())  # factors of LoRA are small


def _model_of_run(path: pathlib.Path) -> ModelConfig | None:
  """Reads the model's configuration from the one that a run recorded in its workdir; None without a record."""
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
