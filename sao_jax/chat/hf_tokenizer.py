"""The tokenizer of a Hugging Face folder, through the `tokenizers` package (the extra `hf`)."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from sao_jax.chat.control_split import ControlSplitter
from sao_jax.chat.stop_tokens import read_stop_ids
from sao_jax.chat.tokenizer_files import TokenizerSettings, read_settings, read_tokenizer
from sao_jax.errors import ConfigError

MARKER = re.compile(r"<[|\uff5c].+[|\uff5c]>", re.DOTALL)  # <|user|>, and the same with full-width bars
REPLACEMENT = "\ufffd"


class HFTokenizer:
  """The tokenizer of a folder with tokenizer.json, with the interface of `ByteTokenizer`. Safe to share by threads.

  Control tokens are those that text must not forge: the ones that tokenizer.json calls special, the ones that look
  like `<|user|>`, and the ones that the folder's settings name (begin, end, stop, ...). `encode` never produces one.
  Markup that the folder keeps as ordinary added tokens (`<think>`, `<tool_call>`) is read wherever it stands, as in
  the published inference engines.

  Attributes:
    folder: the folder that it was read from.
    vocab_size: one more than the largest id; a model may have more rows.
    control_ids: ids of the control tokens.
    bos_id: the begin-of-sequence token, None where the folder has none.
    eos_id: the end-of-sequence token of tokenizer_config.json, else the first of `stop_ids`.
    pad_id: the padding token, else `eos_id`. Masks never come from ids.
    stop_ids: ids that end a turn, from the sources that `read_stop_ids` lists.
    adds_bos: True when a sequence starts with `bos_id`.
    token_names: the tokens that the settings name, for chat templates: {"eos_token": "<|im_end|>", ...}.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    """Reads the folder; nothing is downloaded.

    Raises:
      ConfigError: when the package or a file is missing, or the tokenizer cannot be used turn by turn.
    """
    # The tokens of all files.
    self.folder = _located(folder)
    declared = read_tokenizer(self.folder)
    settings = read_settings(self.folder, declared)
    self._tokenizer = self._load(declared)
    self._add(settings)

    # Tokens with a role, by the names that the settings give them.
    self.token_names = dict(settings.names)
    named = {role: self._tokenizer.token_to_id(name) for role, name in self.token_names.items()}
    self.stop_ids = read_stop_ids(self.folder, named.get("eos_token"))
    self.bos_id, self.eos_id = named.get("bos_token"), named.get("eos_token", self.stop_ids[0])
    self.pad_id = named.get("pad_token", self.eos_id)

    # Control tokens: text must not forge them, so all of them become special.
    controls = {
      token_id: token
      for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
      if token.special or MARKER.fullmatch(token.content) or token_id in (*named.values(), *self.stop_ids)
    }
    self.control_ids = frozenset(controls)
    self._controls = {token.content: token_id for token_id, token in controls.items()}
    for token in controls.values():
      token.special = True
    self._tokenizer.add_special_tokens(list(controls.values()))
    self._splitter = ControlSplitter(self._tokenizer, self._controls)
    self._tokenizer.encode_special_tokens = True  # control tokens become text; `encode_with_specials` puts them in

    self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
    self.adds_bos = self.bos_id is not None and bool(
      settings.values.get("add_bos_token", self._tokenizer.encode("").ids[:1] == [self.bos_id])
    )
    self._check()

  @property
  def control_names(self) -> tuple[str, ...]:
    """The names of the control tokens, as they are written."""
    return tuple(self._controls)

  def id_of(self, name: str) -> int:
    """Looks up the id of a token by its exact name, as in `id_of("<|im_end|>")`.

    Raises:
      ConfigError: when the tokenizer has no such token.
    """
    found = self._tokenizer.token_to_id(name)
    if found is None:
      raise ConfigError("tokenizer", f"{self.folder} has no token {name!r}.", "Use a name that tokenizer.json lists.")
    return found

  def encode(self, text: str) -> Int[np.ndarray, "n"]:
    """Encodes any text as int32 ids; the characters `<|im_end|>` become ordinary tokens, never the control token.

    Raises:
      UnicodeEncodeError: for half a surrogate pair, as `ByteTokenizer` does.
    """
    text.encode("utf-8")  # raises; the package would say that the text is no string
    return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

  def encode_with_specials(self, template: str, restore: Callable[[str], str] = str) -> Int[np.ndarray, "n"]:
    """Encodes *trusted* text in which the names of control tokens stand for the tokens; adds nothing around it.

    Args:
      template: the text.
      restore: function applied to the text between control tokens before it is encoded; its result is plain text.
    """
    ids = []
    for text, control in self._splitter.split(template):
      ids.append(self.encode(restore(text)))
      ids.append(np.array([] if control is None else [control], dtype=np.int32))
    return np.concatenate(ids)

  def decode(self, token_ids: Sequence[int] | Int[np.ndarray, "n"]) -> str:
    """Decodes ids to text: control tokens by name, invalid UTF-8 and ids of a model's padded rows as U+FFFD.

    Raises:
      ValueError: for negative ids.
    """
    pieces: list[str] = []
    run: list[int] = []
    for token_id in np.asarray(token_ids, dtype=np.int64).tolist():
      if token_id < 0:
        raise ValueError(f"token id {token_id} is negative")
      if token_id < self.vocab_size and self._tokenizer.id_to_token(token_id) is not None:
        run.append(token_id)
      else:
        pieces += [self._tokenizer.decode(run, skip_special_tokens=False), REPLACEMENT]
        run = []
    return "".join([*pieces, self._tokenizer.decode(run, skip_special_tokens=False)])

  def decode_bytes(self, token_ids: Sequence[int] | Int[np.ndarray, "n"]) -> str | None:
    """Decodes ids that are all ordinary tokens of valid UTF-8 (U+FFFD itself not allowed); else returns None."""
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.size and (int(ids.min()) < 0 or not self.control_ids.isdisjoint(ids.tolist())):
      return None
    text = self.decode(ids)
    return None if REPLACEMENT in text else text

  def _load(self, declared: dict[str, Any]) -> Any:
    try:
      import tokenizers
    except ImportError as error:
      raise ConfigError(
        "tokenizer", f"The package tokenizers is not installed ({error}).", "Run: pip install -e '.[hf]'"
      ) from error

    try:
      tokenizer = tokenizers.Tokenizer.from_str(json.dumps(declared))
    except Exception as error:  # the package raises plain exceptions
      raise ConfigError(
        "tokenizer", f"tokenizer.json of {self.folder} cannot be read: {error}", "Save the folder again."
      ) from error

    # A saved file may carry settings for truncation and padding.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

  def _add(self, settings: TokenizerSettings) -> None:
    """Adds the tokens that stand in the settings only. The package gives ids in order: the files must agree."""
    import tokenizers

    if settings.values.get("split_special_tokens"):
      raise ConfigError(
        "tokenizer",
        f"tokenizer_config.json of {self.folder} has split_special_tokens: no control token would ever be written.",
        "Take it out.",
      )
    added = [tokenizers.AddedToken(token.content, **{"special": False, **token.flags}) for token in settings.additions]
    self._tokenizer.add_tokens(added)

    for name, promised, source in settings.promises:
      if (got := self._tokenizer.token_to_id(name)) != promised:
        raise ConfigError(
          "tokenizer",
          f"{source} of {self.folder} gives {name!r} the id {promised}, but it gets {got}: ids have a gap, or files "
          "differ.",
          "Let the files agree, with tokens for all ids in between, and save the folder again.",
        )

  def _check(self) -> None:
    """Refuses a tokenizer whose turns cannot be joined, or whose text can forge control tokens."""
    if self.decode(np.concatenate([self.encode(" a\n"), self.encode("a")])) != " a\na":
      raise ConfigError(
        "tokenizer",
        f"The tokenizer of {self.folder} changes blanks at the start of a text, so turns cannot be joined.",
        "Use a byte-level tokenizer without a prefix space, as those of Qwen and GLM.",
      )

    forged = [name for name, token_id in self._controls.items() if token_id in self.encode(name)]
    if forged:
      raise ConfigError(
        "tokenizer",
        f"Plain text produces the control tokens {forged} of {self.folder}.",
        "Use a tokenizer whose control tokens are added tokens only.",
      )


def _located(folder: str | os.PathLike[str]) -> pathlib.Path:
  """A folder on a disk, or the address of one in a bucket (gs://), whose few small files are read in place."""
  if not os.fspath(folder).startswith("gs://"):
    return pathlib.Path(os.path.expanduser(folder))
  from etils import epath

  return epath.Path(folder)
