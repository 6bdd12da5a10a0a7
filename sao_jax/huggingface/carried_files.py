"""The files of a folder that an export carries along, byte for byte: all that is read beside config.json and weights.

They turn texts into token ids and back; code is what config.json and tokenizer_config.json name in an `auto_map`.
"""

from __future__ import annotations

import fnmatch
import pathlib

# Names in the folder, and in its folder of chat templates.
CARRIED = (
  *("tokenizer*.json", "tokenizer.model*", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
  *("vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "tiktoken.model", "spiece.model", "sentencepiece.bpe.model"),
  *("chat_template.jinja", "chat_template.json", "generation_config.json", "*.py"),
)
TEMPLATES = "additional_chat_templates"


def is_carried(name: str) -> bool:
  """Tells if a file, or the folder of further chat templates, is one that exports carry along."""
  return name == TEMPLATES or any(fnmatch.fnmatchcase(name, pattern) for pattern in CARRIED)


def carry_files(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies them from one folder to another; each may be in a bucket."""
  for path in sorted(source.iterdir()):
    if is_carried(path.name) and path.is_file():
      (target / path.name).write_bytes(path.read_bytes())
  if (source / TEMPLATES).is_dir():
    templates = sorted(path for path in (source / TEMPLATES).iterdir() if path.suffix == ".jinja")
    if templates:
      (target / TEMPLATES).mkdir(exist_ok=True)
    for path in templates:
      (target / TEMPLATES / path.name).write_bytes(path.read_bytes())
