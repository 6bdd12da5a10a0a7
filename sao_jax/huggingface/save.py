"""Parameters to a Hugging Face folder: sharded safetensors with an index, config.json, and the tokenizer's files."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec

from sao_jax.config import ModelConfig
from sao_jax.errors import ConfigError
from sao_jax.huggingface.families import family_of_model
from sao_jax.huggingface.families.family import Family, Tensor
from sao_jax.huggingface.folder import CONFIG, INDEX, HFFolder
from sao_jax.huggingface.load import check_shape
from sao_jax.huggingface.safetensors_file import NAMES, PlannedTensor, write_file
from sao_jax.models.critic import critic_specs
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import Params, path_name

# What a folder holds for the texts around a model; copied as it is.
TOKENIZER_FILES = (
  *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
  *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
SHARD_BYTES = 4 << 30
VALUE_HEAD = "value_head.safetensors"  # of a critic, which is otherwise a folder like any other


def export_policy(
  params: Params,
  config: ModelConfig,
  directory: str | os.PathLike,
  *,
  base: HFFolder | None = None,
  dtype: str | None = None,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes a folder that transformers, vLLM and SGLang load. A tied head is the embedding, stored once.

  Args:
    params: as `param_specs(config)` declares them; every process of a pod calls this, the first one writes.
    config: the model's shape.
    directory: to write; it appears when all of it is there.
    base: the folder that the policy started from: its config.json and tokenizer files are kept, and byte for byte the
      tensors that are no part of the policy (a warning says if they are in FP8). None: config.json is written anew.
    dtype: "float32" or "bfloat16", None: that of the parameters. What the family keeps in fp32 stays so.
    shard_bytes: size of a file, at most (unless one tensor is larger).

  Raises:
    ConfigError: `directory` is not empty, no family holds this shape, or `base` has another one.
  """
  family = _family(config, base)
  table = family.tensor_table(config, param_specs(config))
  beyond = [] if base is None else list(beyond_trunk(base))
  planned = [*_plan(params, table, dtype), *beyond]
  quantized = sum(tensor.dtype == "F8_E4M3" for tensor in beyond)
  if quantized:
    logging.warning(
      "%d tensors of multi-token prediction stay in FP8 with their scales, as in %s. The policy is not in FP8 any "
      "more, and config.json no longer says that anything is: what predicts with them must dequantise them itself.",
      quantized,
      base.path,
    )
  fields = _config_fields(family, config, base, family.architecture, planned)
  _write_folder(pathlib.Path(directory), fields, planned, base, shard_bytes)


def export_critic(
  params: Params,
  config: ModelConfig,
  directory: str | os.PathLike,
  *,
  base: HFFolder | None = None,
  dtype: str | None = None,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes a critic: the trunk in the policy's format, and value_head.safetensors ("value_head.weight" [n, D]).

  The arguments are those of `export_policy`.
  """
  family = _family(config, base)
  head = Tensor("value_head.weight", 1)
  trunk = {name: leaf for name, leaf in params.items() if name != "value_head"}
  specs = {name: spec for name, spec in critic_specs(config).items() if name != "value_head"}
  planned = list(_plan(trunk, family.tensor_table(config, specs), dtype))
  fields = _config_fields(family, config, base, family.architecture.removesuffix("ForCausalLM") + "Model", planned)
  heads = list(_plan({"value_head": params["value_head"]}, {"value_head": head}, dtype))
  _write_folder(pathlib.Path(directory), fields, planned, base, shard_bytes, {VALUE_HEAD: heads})


def _family(config: ModelConfig, base: HFFolder | None) -> Family:
  if base is None:
    return family_of_model(config)
  check_shape(base, config)
  return base.family


def _plan(params: Params, table: dict[str, Tensor], dtype: str | None) -> Iterator[PlannedTensor]:
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    tensor = table[path_name(path)]
    target = jnp.dtype(jnp.float32 if tensor.keep_float32 else dtype or leaf.dtype)
    shape = tensor.stored_shape(leaf.shape)
    for position in itertools.product(*map(range, leaf.shape[: tensor.num_stacked])):
      pieces = _piece(leaf, tensor, position, target)
      yield PlannedTensor(tensor.name_at(position), NAMES[target], shape, pieces)


def _piece(leaf: jax.Array, tensor: Tensor, position: tuple[int, ...], dtype: Any) -> Iterator[memoryview]:
  """The bytes of one tensor; nothing is computed before they are asked for."""
  sharding = leaf.sharding
  everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
  stored = np.asarray(_stored(leaf, np.asarray(position, np.int32), tensor.inputs, dtype, everywhere))
  yield np.ascontiguousarray(stored).reshape(-1).view(np.uint8).data


@functools.partial(jax.jit, static_argnames=("inputs", "dtype", "sharding"))
def _stored(leaf: jax.Array, position: jax.Array, inputs: int | None, dtype: Any, sharding: Any) -> jax.Array:
  """One entry of the stacked axes in the layout of its tensor, on every device of the mesh."""
  for i in range(position.shape[0]):
    leaf = jax.lax.dynamic_index_in_dim(leaf, position[i], axis=0, keepdims=False)
  if inputs is not None:
    columns = math.prod(leaf.shape[:inputs])
    leaf = leaf.reshape(columns, -1).T if inputs else leaf.reshape(-1)
  leaf = leaf.astype(dtype)
  return leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)


def beyond_trunk(base: HFFolder) -> Iterator[PlannedTensor]:
  """The tensors of a folder that are no part of its policy, as they are stored."""
  for name in base.beyond_trunk():
    stored = base.tensors[name]
    yield PlannedTensor(name, stored.dtype, stored.shape, stored.read_bytes())


def _config_fields(
  family: Family, config: ModelConfig, base: HFFolder | None, architecture: str, planned: list[PlannedTensor]
) -> dict[str, Any]:
  fields = family.write(config) if base is None else dict(base.fields)
  fields.pop("quantization_config", None)
  dtypes = {"F32": "float32", "BF16": "bfloat16"}
  key = "dtype" if "dtype" in fields else "torch_dtype"
  return fields | {"model_type": family.model_type, "architectures": [architecture], key: dtypes[planned[0].dtype]}


def _write_folder(
  directory: pathlib.Path,
  fields: dict[str, Any],
  planned: list[PlannedTensor],
  base: HFFolder | None,
  shard_bytes: int,
  more: dict[str, list[PlannedTensor]] | None = None,
) -> None:
  if directory.is_dir() and any(directory.iterdir()):
    raise ConfigError("export", f"{directory} is not empty.", "Name a new folder.")
  shards = _shards(planned, shard_bytes)
  names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
  files = dict(zip(names, shards, strict=True)) | (more or {})
  if jax.process_index() != 0:
    for tensor in itertools.chain(*files.values()):
      list(tensor.pieces)  # takes part in gathering them
    return
  temporary = directory.with_name(f".{directory.name}.partial")
  shutil.rmtree(temporary, ignore_errors=True)
  temporary.mkdir(parents=True)
  for name, tensors in files.items():
    write_file(temporary / name, tensors)
  total = sum(tensor.num_bytes for tensor in planned)
  weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
  index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
  _write_json(temporary / INDEX, index)
  _write_json(temporary / CONFIG, fields)
  for name in TOKENIZER_FILES if base is not None else ():
    if (base.path / name).is_file():
      shutil.copyfile(base.path / name, temporary / name)
  if directory.is_dir():
    directory.rmdir()
  os.replace(temporary, directory)
  logging.info("Wrote %s: %d tensors, %.1f MiB, %d files.", directory, len(weight_map), total / 2**20, len(files))


def _shards(planned: list[PlannedTensor], shard_bytes: int) -> list[list[PlannedTensor]]:
  shards: list[list[PlannedTensor]] = [[]]
  size = 0
  for tensor in planned:
    if shards[-1] and size + tensor.num_bytes > shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(tensor)
    size += tensor.num_bytes
  return shards


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
  path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
