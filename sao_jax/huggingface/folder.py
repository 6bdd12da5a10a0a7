"""A Hugging Face folder: its config.json and the place of each of its tensors."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from sao_jax.config import ModelConfig
from sao_jax.configuration.paths import expand, in_bucket, located
from sao_jax.errors import ConfigError
from sao_jax.huggingface.families import family_of_fields
from sao_jax.huggingface.families.family import DEFAULT_MODEL, Family
from sao_jax.huggingface.safetensors_file import Bounds, StoredTensor
from sao_jax.huggingface.weight_files import find_tensors, read_object
from sao_jax.missing_folder import folder_error

CONFIG = "config.json"
SCALE = "_scale_inv"  # suffix of an FP8 weight's name: the tensor with its scales, one per block
FP8_BLOCK = 128  # rows and columns of a block

_TOGETHER, _BYTES_TOGETHER = 16, 64 << 20  # tensors of a bucket that are read at the same time, and bytes of them


def is_hf_folder(path: str | os.PathLike) -> bool:
  """True if `path` is a folder with a config.json that names a model_type."""
  file = expand(path) / CONFIG
  return bool(str(path)) and file.is_file() and "model_type" in read_object(file)


class HFFolder:
  """A folder whose config.json and headers have been read; tensors are read when asked for.

  Attributes:
    path: the folder.
    fields: the content of config.json.
    family: the family that the model belongs to.
    tensors: all tensors by name.
    bytes_read: bytes of tensors that `read` has returned so far.
  """

  def __init__(self, path: str | os.PathLike):
    """Opens the folder at `path`.

    Raises:
      ConfigError: no such folder, no safetensors in it, a broken file, an unknown family or quantisation.
    """
    self.path = located(os.path.expanduser(path))
    if not is_hf_folder(path):
      raise folder_error(
        "model.checkpoint",
        path,
        f"{path} has no {CONFIG} with a model_type.",
        "Name a folder as save_pretrained of transformers writes it.",
      )
    self.fields: dict[str, Any] = read_object(self.path / CONFIG)
    self.family: Family = family_of_fields(self.fields)
    self.tensors: dict[str, StoredTensor] = find_tensors(self.path)
    self.bytes_read, self._lock = 0, threading.Lock()
    _check_quantization(self.fields)

  def model_config(self, model: ModelConfig = DEFAULT_MODEL) -> ModelConfig:
    """Returns `model` with the folder's shape (see `Family.model_config`)."""
    return self.family.model_config(self.fields, model)

  def read(self, name: str, bounds: Bounds | None = None) -> np.ndarray:
    """Reads the part of a tensor within `bounds` (None: all of it), in its stored dtype and layout."""
    part = self.tensors[name].read(bounds)
    with self._lock:
      self.bytes_read += part.nbytes
    return part

  def reads_together(self, num_bytes: int) -> int:
    """Returns how many parts of this size are read at the same time: in a bucket, each waits for an answer."""
    return max(1, min(_TOGETHER, _BYTES_TOGETHER // max(num_bytes, 1))) if in_bucket(self.path) else 1

  def beyond_trunk(self) -> list[str]:
    """Names the tensors that the family declares to be no part of the model, sorted."""
    prefixes = self.family.prefixes_beyond_trunk(self.fields)
    return sorted(name for name in self.tensors if name.startswith(prefixes))


def _check_quantization(fields: dict[str, Any]) -> None:
  quantization = fields.get("quantization_config")
  if quantization is None:
    return
  if not isinstance(quantization, dict):
    raise ConfigError("config.json quantization_config", f"{quantization!r} is not an object.", "Mend the file.")
  method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
  if method != "fp8" or block != [FP8_BLOCK, FP8_BLOCK]:
    raise ConfigError(
      "config.json quantization_config",
      f"{method!r} with weight_block_size {block} is not implemented.",
      "Use the folder in bf16, or one in FP8 with blocks of 128 x 128.",
    )
