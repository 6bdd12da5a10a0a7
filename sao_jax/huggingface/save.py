"""Export of parameters to a Hugging Face folder: safetensors with an index, config.json, the tokenizer's files."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec

from sao_jax.config import ModelConfig
from sao_jax.configuration.output_folder import check_output_folder, whole_folder
from sao_jax.configuration.paths import in_bucket, located
from sao_jax.errors import ConfigError
from sao_jax.huggingface.carried_files import carry_files, is_carried
from sao_jax.huggingface.families import family_of_model
from sao_jax.huggingface.families.family import Family, Tensor, matrix, vector
from sao_jax.huggingface.folder import CONFIG, HFFolder
from sao_jax.huggingface.load import check_shape
from sao_jax.huggingface.safetensors_file import NAMES, PlannedTensor, write_file
from sao_jax.huggingface.weight_files import INDEX, SINGLE
from sao_jax.models.critic import ADDED, critic_specs
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import Params, path_name

SHARD_BYTES = 4 << 30  # 4 GiB
VALUE_HEAD = "value_head.safetensors"  # the file that a critic has beside those of its trunk


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
    params: the parameters that `param_specs(config)` declares. Every process of a pod calls this: all bring their parts
      of one tensor after the other together, and the first one writes it.
    config: the model's shape.
    directory: the folder to write, new or empty; it is complete once it has a config.json.
    base: the folder that the policy started from. Its config.json and tokenizer files are kept, and byte for byte the
      tensors that are no part of the policy (a warning says if they are in FP8). None: config.json is written anew.
    dtype: "float32" or "bfloat16"; None keeps the dtype of each parameter. Tensors that the family stores in fp32 are
      always fp32.
    shard_bytes: the largest size of a file in bytes, unless one tensor is larger.

  Raises:
    ConfigError: `directory` is not empty or cannot be written, no family holds this shape, or `base` has another one.

  >>> import tempfile
  >>> from sao_jax.parallel.params import init_params
  >>> config = ModelConfig(vocab_size=8, num_layers=1, d_model=4, num_heads=1, num_kv_heads=1, head_dim=4, d_ff=4)
  >>> with tempfile.TemporaryDirectory() as workdir:
  ...   folder = pathlib.Path(workdir, "tiny")
  ...   export_policy(init_params(param_specs(config), jax.random.key(0)), config, folder, dtype="bfloat16")
  ...   sorted(file.name for file in folder.iterdir())
  ['config.json', 'model-00001-of-00001.safetensors', 'model.safetensors.index.json']
  """
  family = _family(config, base)
  table = family.tensor_table(config, param_specs(config))
  beyond = [] if base is None else list(copied_tensors(base))
  planned = [*_plan(params, table, dtype), *beyond]

  # The folder loses its quantization_config, although these tensors stay quantised.
  quantized = sum(tensor.dtype == "F8_E4M3" for tensor in beyond)
  if quantized:
    logging.warning(
      "%d tensors of multi-token prediction stay in FP8 with their scales, as in %s. The policy is not in FP8 any "
      "more, and config.json no longer says that anything is: what predicts with them must dequantise them itself.",
      quantized,
      base.path,
    )

  fields = _config_fields(family, config, base, family.architecture, planned)
  _write_folder(located(directory), fields, planned, base, shard_bytes)


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

  That file also has "logprob_embed.weight" [D] of a critic that reads log-probs.
  The arguments and errors are those of `export_policy`. Tensors of `base` that are no part of the policy are left out.
  """
  family = _family(config, base)
  table = {"value_head": matrix("value_head.weight"), "logprob_embed": vector("logprob_embed.weight")}
  trunk = {name: leaf for name, leaf in params.items() if name not in ADDED}
  specs = {name: spec for name, spec in critic_specs(config).items() if name not in ADDED}
  planned = list(_plan(trunk, family.tensor_table(config, specs), dtype))
  fields = _config_fields(family, config, base, family.architecture.removesuffix("ForCausalLM") + "Model", planned)
  heads = list(_plan({name: params[name] for name in ADDED if name in params}, table, dtype))
  _write_folder(located(directory), fields, planned, base, shard_bytes, {VALUE_HEAD: heads})


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
  """Yields the bytes of one tensor; nothing is computed before they are asked for. Other processes than 0 get none."""
  sharding, everywhere, split = leaf.sharding, None, (False,) * len(position)
  if isinstance(sharding, NamedSharding):
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    axes = [*sharding.spec, *[None] * leaf.ndim]
    split = tuple(axes[i] is not None for i in range(len(position)))
  stored = stored_entry(leaf, np.asarray(position, np.int32), tensor.inputs, dtype, everywhere, split)
  if jax.process_index() == 0:
    yield np.ascontiguousarray(np.asarray(stored)).reshape(-1).view(np.uint8).data
  else:
    jax.block_until_ready(stored)


@functools.partial(jax.jit, static_argnames=("inputs", "dtype", "sharding", "split"))
def stored_entry(
  leaf: jax.Array, position: jax.Array, inputs: int | None, dtype: Any, sharding: Any, split: tuple[bool, ...]
) -> jax.Array:
  """Returns one entry of the stacked axes in the layout of its tensor, on every device of the mesh.

  No device holds more than its share of the leaf and this entry.

  Args:
    leaf: a parameter.
    position: of the entry on each stacked axis.
    inputs: the number of axes behind them that are inputs; None for a tensor in our layout.
    dtype: of the result.
    sharding: that of an array on every device; None where there is no mesh.
    split: for each stacked axis, if devices hold different parts of it.
  """
  for i, divided in enumerate(split):
    leaf = (_summed_entry if divided else _entry)(leaf, position[i])
  if inputs is not None:
    columns = math.prod(leaf.shape[:inputs])
    leaf = leaf.reshape(columns, -1).T if inputs else leaf.reshape(-1)
  leaf = leaf.astype(dtype)
  return leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)


def _entry(leaf: jax.Array, index: jax.Array) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(leaf, index, axis=0, keepdims=False)


def _summed_entry(leaf: jax.Array, index: jax.Array) -> jax.Array:
  """The same by a sum over the first axis: to take an entry of an axis that is split, XLA would gather all of it.

  The sum is one of bits, and of zeros but for one entry: exact, whatever the numbers are.
  """
  bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
  wanted = (jnp.arange(leaf.shape[0]) == index).reshape(-1, *[1] * (leaf.ndim - 1))
  entry = jnp.sum(jnp.where(wanted, bits, jnp.zeros_like(bits)), axis=0, dtype=bits.dtype)
  return jax.lax.bitcast_convert_type(entry, leaf.dtype)


def copied_tensors(base: HFFolder) -> Iterator[PlannedTensor]:
  """Plans a byte-for-byte copy of the tensors of a folder that are no part of its policy."""
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
  fields = {"model_type": family.model_type} | fields  # a folder may have another name for the format
  return fields | {"architectures": [architecture], key: dtypes[planned[0].dtype]}


def check_export_folder(directory: str | os.PathLike, field: str = "export") -> None:
  """Refuses a folder that an export cannot write to, see `check_output_folder`.

  In a bucket it may hold what an export has left that did not come to its end.
  """
  check_output_folder(directory, field)
  if in_bucket(directory) and located(directory).is_dir():
    names = {path.name for path in located(directory).iterdir()}
    left = lambda name: name == INDEX or is_carried(name) or name.endswith(".safetensors")
    if SINGLE in names or not all(map(left, names)):  # that file would be read in place of those that are written
      raise ConfigError(field, f"{directory} is not empty.", "Name a new folder.")


def _write_folder(
  directory: pathlib.Path,
  fields: dict[str, Any],
  planned: list[PlannedTensor],
  base: HFFolder | None,
  shard_bytes: int,
  more: dict[str, list[PlannedTensor]] | None = None,
) -> None:
  if jax.process_index() == 0:
    check_export_folder(directory)

  # Names of the files, in the manner of transformers, and their tensors.
  shards = _shards(planned, shard_bytes)
  names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
  files = dict(zip(names, shards, strict=True)) | (more or {})

  # Gathering a sharded tensor takes every process of a pod: those that do not write ask for the same pieces.
  if jax.process_index() != 0:
    for tensor in itertools.chain(*files.values()):
      collections.deque(tensor.pieces, maxlen=0)
    return

  # Weights, index, and the configuration last: a folder without config.json is none.
  with whole_folder(directory, last=CONFIG) as target:
    for name, tensors in files.items():
      write_file(target / name, tensors)
    total = sum(tensor.num_bytes for tensor in planned)
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(target / INDEX, index)
    if base is not None:
      carry_files(base.path, target)
    _write_json(target / CONFIG, fields)
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
