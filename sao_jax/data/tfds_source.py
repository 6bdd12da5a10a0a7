"""Prompts from any TensorFlow Datasets data set that supports random access; TensorFlow itself is not needed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.episode import BadPrompt, Prompt, PromptKey
from sao_jax.errors import ConfigError


class TFDSPrompts(Sequence[Prompt]):
  """Random access (`len`, `[index]`) to a prepared TFDS split as prompts.

  The data set's own splits keep training and held-out prompts apart ("train[:90%]", "test", ...).

  >>> prompts = TFDSPrompts(
  ...   "sao_tiny_questions:1.0.0",
  ...   "train[:80%]",
  ...   environment="questions",
  ...   fields={"question": "text", "answer": "label"},
  ...   data_dir=data_dir,  # where the data set was prepared
  ... )
  >>> len(prompts), prompts[2].key.id, sorted(prompts[2].data)
  (8, 2, ['answer', 'question'])
  """

  def __init__(
    self,
    name: str,
    split: str,
    *,
    environment: str,
    fields: Mapping[str, str],
    data_dir: str | os.PathLike[str] | None = None,
  ):
    """Opens the data set through `tfds.data_source`; it downloads nothing.

    Args:
      name: TFDS name, "dataset", "dataset/config" or "dataset/config:version".
      split: TFDS split, slices allowed.
      environment: name for the prompt keys.
      fields: key in `Prompt.data` -> feature of the data set, for example {"question": "text", "answer": "label"}.
      data_dir: directory of prepared data sets; None: TFDS's default.

    Raises:
      ConfigError: when the data set, the split or a feature does not exist.
    """
    import tensorflow_datasets as tfds  # here, as it imports jax

    # TFDS reports a wrong name, split or directory, and a file format without random access, by any of these errors.
    if data_dir is not None:
      data_dir = os.path.expanduser(data_dir)
    try:
      self._source = tfds.data_source(name, split=split, data_dir=data_dir, download=False)
    except (
      tfds.core.DatasetNotFoundError,
      AssertionError,
      OSError,
      NotImplementedError,
      ValueError,
      KeyError,
    ) as error:
      reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__  # TFDS lists all sets
      raise ConfigError(
        "tfds",
        f"Cannot open split {split!r} of {name!r} in {data_dir or 'the default data_dir'}: {reason}",
        'Prepare it first with file_format="array_record", and check name, split and data_dir.',
      ) from error
    self._environment, self._fields = environment, dict(fields)

    # All examples have the same features, so the first one tells which there are.
    known = self._source[0].keys() if len(self._source) else ()
    missing = sorted(set(self._fields.values()) - set(known))
    if missing:
      raise ConfigError("fields", f"{name!r} has no feature {missing}.", f"Choose among {sorted(known)}.")

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Prompt:
    if not 0 <= index < len(self):
      raise IndexError(index)
    example = self._source[index]
    data = {target: json_value(example[feature]) for target, feature in self._fields.items()}
    return Prompt(PromptKey(self._environment, int(index), 0), data)


def json_value(value: Any) -> Any:
  """Converts a feature to JSON types: bytes become text, NumPy scalars and arrays become numbers and lists.

  Raises:
    BadPrompt: for features that no prompt can hold (invalid UTF-8).
  """
  if isinstance(value, bytes):
    try:
      return value.decode("utf-8")
    except UnicodeDecodeError as error:
      raise BadPrompt(
        *("fields", "A feature holds bytes that are not UTF-8 text.", "Map only text or numbers."),
        reason="prompt_not_text",
      ) from error
  if isinstance(value, np.generic | np.ndarray):
    return json_value(value.tolist())
  if isinstance(value, dict):
    return {name: json_value(item) for name, item in value.items()}
  if isinstance(value, list | tuple):
    return [json_value(item) for item in value]
  return value
