"""The tokens that end a turn, as a folder's files tell them."""

from __future__ import annotations

import pathlib
from typing import Any

from sao_jax.chat.tokenizer_files import read_json
from sao_jax.errors import ConfigError


def read_stop_ids(folder: pathlib.Path, eos_id: int | None) -> tuple[int, ...]:
  """Reads the ids after which a model stops, from the first of these that says something:

  1. `eos_token_id` of generation_config.json, one id or several;
  2. where that file is missing, `eos_token_id` of config.json, or of its `text_config`;
  3. `eos_token` of the tokenizer's settings.

  The first two are what `generate` of transformers reads. It never stops where they say null; here the tokenizer
  decides then.

  Args:
    folder: the folder.
    eos_id: the id of the tokenizer's `eos_token`, if it has one.

  Raises:
    ConfigError: when nothing says it, or the ids are no ids.
  """
  path = folder / "generation_config.json"
  path = path if path.is_file() else folder / "config.json"
  declared = read_json(path)
  stop_ids = _ids(declared.get("eos_token_id"), path)
  if not stop_ids and path.name == "config.json" and isinstance(declared.get("text_config"), dict):
    stop_ids = _ids(declared["text_config"].get("eos_token_id"), path)
  if not stop_ids and eos_id is None:
    raise ConfigError(
      "tokenizer",
      f"Nothing in {folder} says which token ends a turn.",
      "Add eos_token to tokenizer_config.json, or eos_token_id to generation_config.json.",
    )
  return stop_ids or (eos_id,)


def _ids(value: Any, path: pathlib.Path) -> tuple[int, ...]:
  """Reads null, one id or a list of ids, each once."""
  ids = value if isinstance(value, list) else [] if value is None else [value]
  if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
    raise ConfigError("tokenizer", f"eos_token_id of {path} is {value!r}, no token ids.", "Write ids, or null.")
  return tuple(dict.fromkeys(ids))
