"""Import of parameters from a Hugging Face folder, tensor by tensor straight into the mesh.

A process reads only the byte ranges that the shards of its devices need, one at a time. Apart from what the devices
hold, host memory never holds more than twice the largest tensor, and 64 MiB of those that are read ahead of a bucket.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Float

from sao_jax.config import ModelConfig
from sao_jax.errors import ConfigError
from sao_jax.huggingface.families.family import Tensor, shape_differences
from sao_jax.huggingface.folder import FP8_BLOCK, SCALE, HFFolder
from sao_jax.huggingface.safetensors_file import Bounds
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.params import Params, ParamSpec, Specs, path_name, path_names

FLOATS = ("F32", "BF16", "F16", "F8_E4M3")  # the dtypes of weights that are read
SCALES = FLOATS[:3]  # those of their scales

# The bits that are all ones in a number that is not finite: those of the exponent. In e4m3fn, which has no infinity,
# they are all but the sign.
_NOT_FINITE = {
  "float32": np.uint32(0x7F800000),
  "bfloat16": np.uint16(0x7F80),
  "float16": np.uint16(0x7C00),
  "float8_e4m3fn": np.uint8(0x7F),
}
_CHUNK = 1 << 16  # numbers that are looked at together
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_FREQUENCIES = "rotary_emb.inv_freq"  # part of the names under which old files keep what config.json decides


def import_policy(path: str | os.PathLike, config: ModelConfig, mesh: Mesh | None = None) -> Params:
  """Imports the parameters of `param_specs(config)` from a folder, in config.param_dtype, sharded on `mesh`.

  Without a mesh they are on the first device of this process.

  Raises:
    ConfigError: the folder's shape is not that of `config`, or one error that lists all tensors that are missing,
      unknown, of another shape, or of a dtype that is not read.

  >>> import pathlib, tempfile
  >>> from sao_jax.huggingface.save import export_policy
  >>> from sao_jax.parallel.params import init_params
  >>> config = ModelConfig(vocab_size=8, num_layers=1, d_model=4, num_heads=1, num_kv_heads=1, head_dim=4, d_ff=4)
  >>> with tempfile.TemporaryDirectory() as workdir:
  ...   folder = pathlib.Path(workdir, "tiny")
  ...   export_policy(init_params(param_specs(config), jax.random.key(0)), config, folder)
  ...   params = import_policy(folder, config)
  >>> params["embed"].shape  # [V, D]
  (8, 4)
  """
  folder = HFFolder(path)
  check_shape(folder, config)
  _check_architecture(folder, folder.family.architecture)
  specs = param_specs(config)
  check_tensors(folder, config, specs)
  return load_leaves(folder, folder.family.tensor_table(config, specs), specs, mesh)


def check_shape(folder: HFFolder, config: ModelConfig) -> None:
  """Raises ConfigError, listing the differences, when `config` is not of the folder's shape."""
  differences = shape_differences(config, folder.model_config())
  if differences:
    raise ConfigError(
      "model",
      f"it has not the shape of {folder.path}: {'; '.join(differences)}.",
      "Take the shape from the folder: sao_jax.huggingface.pretrained.with_folder_shape(config), as the launchers do.",
    )


def check_tensors(folder: HFFolder, config: ModelConfig, specs: Specs) -> None:
  """Compares the folder's tensors with the parameters in `specs`; logs those that are declared to be beyond the model.

  Raises:
    ConfigError: one error that lists all tensors that are missing, unknown, of another shape, or of a dtype that is not
      read.
  """
  # What must be there: one tensor for each entry of a parameter's stacked axes.
  table = folder.family.tensor_table(config, specs)
  leaves = dict(zip(path_names(specs), jax.tree.leaves(specs), strict=True))
  expected = {
    tensor.name_at(position): tensor.stored_shape(leaves[name].shape)
    for name, tensor in table.items()
    for position in itertools.product(*map(range, leaves[name].shape[: tensor.num_stacked]))
  }
  problems = [f"{name} {list(shape)} is missing" for name, shape in expected.items() if name not in folder.tensors]

  # What may be there: these weights, scales of those in FP8, a copy of the tied embedding, tensors beyond the model,
  # and the frequencies of rotary embeddings, which transformers passes over.
  beyond = folder.beyond_trunk()
  ignored = {*beyond, *(name for name in folder.tensors if _FREQUENCIES in name)}
  for name, stored in folder.tensors.items():
    weight = name.removesuffix(SCALE)
    if name in expected:
      if stored.shape != expected[name]:
        problems.append(f"{name} is {list(stored.shape)}, expected {list(expected[name])}")
      if stored.dtype not in FLOATS:
        problems.append(f"{name} is {stored.dtype}, read are {', '.join(FLOATS)}")
      if stored.dtype == "F8_E4M3" and name + SCALE not in folder.tensors:
        problems.append(f"{name}{SCALE} is missing, {name} is in FP8")
    # One scale per block; blocks at the edges may be smaller.
    elif weight != name and weight in expected and len(expected[weight]) == 2:
      blocks = tuple(-(-size // FP8_BLOCK) for size in expected[weight])
      if stored.shape != blocks:
        problems.append(f"{name} is {list(stored.shape)}, expected {list(blocks)}")
      if stored.dtype not in SCALES:
        problems.append(f"{name} is {stored.dtype}, read are {', '.join(SCALES)}")
    elif name == _HEAD and config.tie_embeddings and "embed" in table:
      if not _same_data(folder, _HEAD, _EMBEDDING):
        problems.append(f"{_HEAD} differs from {_EMBEDDING}, although tie_word_embeddings says that they are one")
    elif name not in ignored:
      problems.append(f"{name} {list(stored.shape)} is not part of the model")

  if problems:
    raise ConfigError(
      "model.checkpoint",
      f"{folder.path} does not hold the model of its config.json:\n    " + "\n    ".join(problems),
      "Use a folder whose tensors and config.json belong together.",
    )

  # Log the tensors that are neither read nor trained.
  if beyond:
    size = sum(folder.tensors[name].num_bytes for name in beyond) / 2**20
    prefixes = ", ".join(f"{prefix}*" for prefix in folder.family.prefixes_beyond_trunk(folder.fields))
    logging.info("Not part of the policy, kept for export: %d tensors %s (%.1f MiB).", len(beyond), prefixes, size)


def load_leaves(folder: HFFolder, table: dict[str, Tensor], specs: Specs, mesh: Mesh | None) -> Params:
  """Reads every parameter that `specs` declares; `check_tensors` must have passed.

  Raises:
    ConfigError: a tensor has numbers that are not finite, in the part that this process reads.
  """
  if mesh is None:
    single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: single, specs)
  else:
    shardings = Layout(mesh).param_shardings(specs)
  load = lambda path, spec, sharding: load_leaf(folder, table[path_name(path)], spec, sharding)
  return jax.tree_util.tree_map_with_path(load, specs, shardings)


def load_leaf(folder: HFFolder, tensor: Tensor, spec: ParamSpec, sharding: Sharding) -> jax.Array:
  """Reads one parameter, stacked from its tensors shard by shard; replicas of a shard share one read."""
  # The devices by the part of the parameter that they hold.
  shape, stacked, dtype = spec.shape, tensor.num_stacked, jnp.dtype(spec.dtype)
  replicas: dict[Bounds, list[Any]] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    replicas.setdefault(bounds, []).append(device)

  # Each shard starts as zeros and is filled tensor by tensor, on its devices.
  shards = []
  for bounds, devices in replicas.items():
    shard_shape = tuple(stop - start for start, stop in bounds)
    stored = _stored_bounds(bounds[stacked:], shape[stacked:], tensor.inputs)
    buffers = [jnp.zeros(shard_shape, dtype, device=device) for device in devices]
    positions = list(itertools.product(*(range(*part) for part in bounds[:stacked])))
    names = [tensor.name_at(position) for position in positions]
    together = folder.reads_together(math.prod(shard_shape[stacked:]) * dtype.itemsize)
    for position, read in zip(positions, _read_ahead(folder, names, stored, together), strict=True):
      local = np.asarray([at - start for at, (start, _) in zip(position, bounds)], np.int32)
      buffers = _write_piece(read, stored, buffers, local, same_order=tensor.inputs is None)
    shards += buffers
  return jax.make_array_from_single_device_arrays(shape, sharding, shards)


_Piece = tuple[np.ndarray, np.ndarray | None]


def _read_ahead(folder: HFFolder, names: list[str], bounds: Bounds, together: int) -> Iterator[Callable[[], _Piece]]:
  """Yields, for each tensor, what returns the part of it within `bounds`; so many are read at the same time."""
  if together == 1:
    for name in names:
      yield functools.partial(_read_piece, folder, name, bounds)
    return
  with concurrent.futures.ThreadPoolExecutor(together, thread_name_prefix="tensors") as threads:
    under_way = collections.deque()
    for name in names:
      under_way.append(threads.submit(_read_piece, folder, name, bounds))
      if len(under_way) == together:
        yield under_way.popleft().result
    while under_way:
      yield under_way.popleft().result


def _write_piece(
  read: Callable[[], _Piece], bounds: Bounds, buffers: list[jax.Array], position: np.ndarray, same_order: bool
) -> list[jax.Array]:
  """Reads part of a tensor and writes it into every replica; when this returns, host memory no longer holds it."""
  where = [jax.device_put(position, buffer.sharding) for buffer in buffers]  # here jax frees the piece before this one
  piece, scales = read()
  offsets = tuple(start % FP8_BLOCK for start, _ in bounds)
  written = []
  for buffer, at in zip(buffers, where, strict=True):
    item = jax.device_put(piece, buffer.sharding, may_alias=False)  # copied: a CPU device would keep the piece alive
    if scales is not None:
      item = dequantize(item, jax.device_put(scales, buffer.sharding), offsets)
    written.append(_write(buffer, item, at, same_order))
  return jax.block_until_ready(written)


def _read_piece(folder: HFFolder, name: str, bounds: Bounds) -> _Piece:
  """Reads part of a tensor and, if it is in FP8, the scales of the blocks that the part touches."""
  piece = _read_finite(folder, name, bounds)
  if folder.tensors[name].dtype != "F8_E4M3":
    return piece, None
  blocks = tuple((start // FP8_BLOCK, -(-stop // FP8_BLOCK)) for start, stop in bounds)
  return piece, _read_finite(folder, name + SCALE, blocks)


def _read_finite(folder: HFFolder, name: str, bounds: Bounds) -> np.ndarray:
  """Reads part of a tensor. ConfigError when there are numbers in it that are NaN or infinite."""
  part = folder.read(name, bounds)
  count = count_not_finite(part)
  if count:
    raise ConfigError(
      "model.checkpoint",
      f"{name} in {folder.tensors[name].path} has {count} numbers that are not finite, of {part.size} read.",
      "Use a folder of before its training diverged, or copy this one again.",
    )
  return part


def count_not_finite(part: np.ndarray) -> int:
  """Counts NaN and infinities: the numbers with nothing but ones in the bits of their exponent.

  >>> count_not_finite(np.array([1.0, np.nan, -np.inf], np.float32))
  2
  """
  ones = _NOT_FINITE[part.dtype.name]
  flat = part.reshape(-1).view(ones.dtype)
  chunks = (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))  # the copies of a part are small
  return sum(int(np.count_nonzero(chunk & ones == ones)) for chunk in chunks)


def _stored_bounds(bounds: Bounds, shape: tuple[int, ...], inputs: int | None) -> Bounds:
  """Translates a part of our parameter [*inputs, *outputs] to rows and columns of the tensor [outputs, inputs]."""
  if inputs is None:
    return bounds
  parts = (_flat_bounds(bounds[inputs:], shape[inputs:]), _flat_bounds(bounds[:inputs], shape[:inputs]))
  return parts if inputs else parts[:1]


def _flat_bounds(bounds: Bounds, shape: tuple[int, ...]) -> tuple[int, int]:
  """Translates a part of several axes to a range of those axes flattened; only the first one may be split."""
  if any(part != (0, size) for part, size in zip(bounds[1:], shape[1:])):
    raise ValueError(f"{bounds} of {shape} is not one range of the flattened axes")
  inner = math.prod(shape[1:])
  return (bounds[0][0] * inner, bounds[0][1] * inner) if bounds else (0, 1)


@functools.partial(jax.jit, static_argnames="same_order", donate_argnames="buffer")
def _write(buffer: jax.Array, piece: jax.Array, position: jax.Array, same_order: bool) -> jax.Array:
  """Replaces the entry at `position` of the buffer's stacked axes by a stored piece, transposed unless `same_order`."""
  item = piece if same_order else piece.T
  stacked = position.shape[0]
  item = item.reshape((1,) * stacked + buffer.shape[stacked:]).astype(buffer.dtype)
  start = [position[i] for i in range(stacked)] + [0] * (buffer.ndim - stacked)
  return jax.lax.dynamic_update_slice(buffer, item, start)


@functools.partial(jax.jit, static_argnames="offsets")
def dequantize(
  piece: Float[Array, "rows columns"], scales: Float[Array, "row_blocks column_blocks"], offsets: tuple[int, ...]
) -> Float[Array, "rows columns"]:
  """Multiplies each value by the scale of its block of 128 x 128; returns fp32.

  Args:
    piece: part of an FP8 weight.
    scales: the scales of the blocks that the piece touches.
    offsets: row and column inside the first block at which the piece begins.
  """
  rows, columns = (
    (offset + jnp.arange(size, dtype=jnp.int32)) // FP8_BLOCK for offset, size in zip(offsets, piece.shape, strict=True)
  )
  return piece.astype(jnp.float32) * scales.astype(jnp.float32)[rows][:, columns]


def _check_architecture(folder: HFFolder, wanted: str) -> None:
  found = folder.fields.get("architectures") or [wanted]
  if found != [wanted]:
    raise ConfigError("config.json architectures", f"{folder.path} is a {found}, not a {wanted}.", "Name another one.")


def _same_data(folder: HFFolder, name: str, other: str) -> bool:
  first, second = folder.tensors[name], folder.tensors.get(other)
  if second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
    return False
  return all(a == b for a, b in zip(first.read_bytes(), second.read_bytes(), strict=True))
