"""The JSON files of a tokenizer folder: which roles tokens have, and which tokens come on top of tokenizer.json.

| file | read | effect |
|---|---|---|
| tokenizer.json | always | the vocabulary, the pipeline, tokens with their ids |
| tokenizer_config.json | always | roles; `added_tokens_decoder`, `additional_special_tokens`, `extra_special_tokens` |
| special_tokens_map.json | without `added_tokens_decoder` | roles and extra tokens, before those of the settings |
| added_tokens.json | without `added_tokens_decoder` | tokens with their ids |

Order and precedence are those of transformers, so that the same tokens get the same ids.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from sao_jax.errors import ConfigError
from sao_jax.missing_folder import folder_error

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
ADDED = "added_tokens_decoder"
SAVE_AGAIN = "Save the folder again."
SLOW_FILES = ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")


@dataclasses.dataclass(frozen=True)
class Addition:
  """A token for the package to add: a new one, or one that it has and that gets these flags.

  Attributes:
    content: its text.
    flags: those of `tokenizers.AddedToken` that a file gives; the package has defaults for others.
  """

  content: str
  flags: Mapping[str, bool]


@dataclasses.dataclass(frozen=True)
class TokenizerSettings:
  """All that the files beside tokenizer.json say.

  Attributes:
    names: the token of every role that has one, as templates read them: {"eos_token": "<|im_end|>", ...}; families
      may have roles of their own, such as image_token.
    additions: tokens to add, in order.
    promises: (token, id, file), the ids that files give.
    values: the other fields.
  """

  names: Mapping[str, str]
  additions: tuple[Addition, ...]
  promises: tuple[tuple[str, int, str], ...]
  values: Mapping[str, Any]


def read_settings(folder: pathlib.Path, declared: Mapping[str, Any]) -> TokenizerSettings:
  """Reads and merges the files beside tokenizer.json.

  Args:
    folder: the folder.
    declared: the content of its tokenizer.json.

  Raises:
    ConfigError: when a file is no JSON object, or holds something that is no token or no id.
  """
  known = {token["content"] for token in declared["added_tokens"]}
  promises = [(token["content"], token["id"], "tokenizer.json") for token in declared["added_tokens"]]
  values = read_json(folder / "tokenizer_config.json")
  extra = values.get("extra_special_tokens") or values.get("additional_special_tokens") or []

  # Older folders tell roles in a file of their own. A newer one may still have it, but nobody reads it.
  is_older = ADDED not in values
  if is_older:
    older = read_json(folder / "special_tokens_map.json")
    extra, values = _merged(extra, older), {**values, **older}

  # Roles: the known ones, those of the family, and extra tokens that have names.
  own = [role for role, token in values.items() if role.endswith("_token") and isinstance(token, str | dict)]
  roles = {role: values[role] for role in dict.fromkeys([*ROLES, *own]) if values.get(role) is not None}
  roles |= extra if isinstance(extra, dict) else {}
  named = {role: _addition(folder, role, token) for role, token in roles.items()}
  others = [] if isinstance(extra, dict) else [_addition(folder, "extra_special_tokens", token) for token in extra]
  special = [*named.values(), *others]

  # Tokens with ids: the settings have flags for those of tokenizer.json, too; the older list has none.
  if is_older:
    source = "added_tokens.json"
    flags = lambda name: dict.fromkeys(["special"], any(name == token.content for token in special))
    listed = [(place, Addition(name, flags(name))) for name, place in read_json(folder / source).items()]
  else:
    source = "tokenizer_config.json"
    listed = [(place, _addition(folder, ADDED, token)) for place, token in (values[ADDED] or {}).items()]
  listed = sorted(((_id(folder, source, place), token) for place, token in listed), key=lambda item: item[0])
  promises += [(token.content, place, source) for place, token in listed]
  additions = [token for _, token in listed if not is_older or token.content not in known]

  # Roles and extra tokens that no list has shown come last.
  known |= {token.content for token in additions}
  for token in special:
    if token.content not in known:
      known.add(token.content)
      additions.append(Addition(token.content, {**token.flags, "special": True}))
  return TokenizerSettings(
    {role: token.content for role, token in named.items()}, tuple(additions), tuple(promises), values
  )


def read_json(path: pathlib.Path, remedy: str | None = None) -> dict[str, Any]:
  """Reads the object in a JSON file. A missing file is an empty object, or an error when there is a `remedy` for it.

  Raises:
    ConfigError: when the file is missing and has a remedy, or holds no JSON object.
  """
  if not path.is_file():
    if remedy is None:
      return {}
    raise folder_error("tokenizer", path.parent, f"{path.parent} has no {path.name}.", remedy)
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ConfigError("tokenizer", f"{path} is not JSON: {error}", SAVE_AGAIN) from error
  if not isinstance(value, dict):
    raise ConfigError("tokenizer", f"{path} holds a {type(value).__name__}, not an object.", SAVE_AGAIN)
  return value


def read_tokenizer(folder: pathlib.Path) -> dict[str, Any]:
  """Reads tokenizer.json.

  Raises:
    ConfigError: when there is none; a folder with the files of a slow tokenizer is told how to make one.
  """
  slow = [name for name in SLOW_FILES if (folder / name).is_file()]
  if not slow or (folder / "tokenizer.json").is_file():
    return read_json(folder / "tokenizer.json", "Save it with a fast tokenizer's `save_pretrained`.")
  raise ConfigError(
    "tokenizer",
    f"{folder} has no tokenizer.json, only {' and '.join(slow)} of a slow tokenizer.",
    "Convert it once: `transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`.",
  )


def _merged(extra: Any, older: Mapping[str, Any]) -> Any:
  """Extra tokens of the settings and of special_tokens_map.json."""
  more = older.get("extra_special_tokens")
  if isinstance(more, dict) or isinstance(extra, dict):
    return {**(extra if isinstance(extra, dict) else {}), **(more if isinstance(more, dict) else {})}
  return [*extra, *(token for token in more or [] if token not in extra)] or older.get("additional_special_tokens", [])


def _addition(folder: pathlib.Path, field: str, token: Any) -> Addition:
  """Reads a token, given as its text or as an object with flags."""
  content = token.get("content") if isinstance(token, dict) else token
  if not isinstance(content, str) or not content:
    raise ConfigError("tokenizer", f"{field} of {folder} holds {token!r}, which is no token.", SAVE_AGAIN)
  return Addition(content, {flag: token[flag] for flag in FLAGS if flag in token} if isinstance(token, dict) else {})


def _id(folder: pathlib.Path, source: str, place: Any) -> int:
  """Reads an id, which is a key in one file and a value in another."""
  try:
    return int(place)
  except (TypeError, ValueError) as error:
    raise ConfigError("tokenizer", f"{source} of {folder} has the id {place!r}.", SAVE_AGAIN) from error
