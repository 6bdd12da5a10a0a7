"""Files beside config.json and the weights: what reads a folder opens none that an export leaves behind."""

from __future__ import annotations

import builtins
import io
import os
import pathlib

import jax
import pytest
from toys import chat_toy, hf_toy, parity

from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.huggingface.convert import to_checkpoint, to_hf
from sao_jax.huggingface.folder import HFFolder
from sao_jax.huggingface.load import import_policy
from sao_jax.huggingface.save import export_policy

TEMPLATE = "additional_chat_templates/tool_use.jinja"
# Everything that a tokenizer's folder may have, at its oldest and its newest.
MORE = {
  "chat_template.jinja": chat_toy.PLAIN,
  TEMPLATE: chat_toy.PLAIN,
  "special_tokens_map.json": '{"eos_token": "<|im_end|>"}',
  "added_tokens.json": "{}",
  "generation_config.json": '{"eos_token_id": [3]}',
  "tokenizer.model": "a model of sentencepiece",
  "chat_template.json": '{"chat_template": "a"}',
  "vocab.json": "{}",
  "merges.txt": "",
  "tokenization_own.py": "",
}


@pytest.fixture
def source(tmp_path):
  pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")
  folder, _ = hf_toy.make_folder(tmp_path / "source", hf_toy.TIED)
  chat_toy.save_folder(folder.path)
  for name, text in MORE.items():
    (folder.path / name).parent.mkdir(exist_ok=True)
    (folder.path / name).write_text(text)
  for name in ("README.md", "pytorch_model.bin", "additional_chat_templates/notes.md"):
    (folder.path / name).write_text("nothing that is read")
  return folder.path


def files_of(folder):
  return {os.fspath(path.relative_to(folder)) for path in pathlib.Path(folder).rglob("*") if path.is_file()}


def opened(monkeypatch, folder, read):
  """The files of a folder that are opened while `read` runs."""
  found, real = set(), io.open

  def noted(file, *arguments, **options):
    if not isinstance(file, int) and pathlib.Path(os.fsdecode(file)).is_relative_to(folder):
      found.add(os.fspath(pathlib.Path(os.fsdecode(file)).relative_to(folder)))
    return real(file, *arguments, **options)

  with monkeypatch.context() as patch:
    patch.setattr(io, "open", noted)
    patch.setattr(builtins, "open", noted)
    read()
  return found


def read_with_transformers(folder):
  transformers = pytest.importorskip("transformers", reason=parity.REASON)
  transformers.AutoTokenizer.from_pretrained(folder)
  transformers.GenerationConfig.from_pretrained(folder)


def read_here(folder):
  import_policy(folder, hf_toy.TIED)
  ChatRenderer(HFTokenizer(folder))


@pytest.mark.parametrize("read", [read_here, read_with_transformers])
def test_what_is_opened_is_carried_along(tmp_path, source, monkeypatch, read):
  found = opened(monkeypatch, source, lambda: read(source))
  assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", TEMPLATE} <= found
  assert "generation_config.json" in found
  params = import_policy(source, hf_toy.TIED)
  export_policy(params, hf_toy.TIED, tmp_path / "export", base=HFFolder(source))
  exported = files_of(tmp_path / "export")
  assert found - exported == set() and set(MORE) <= exported
  assert not {"README.md", "pytorch_model.bin", "additional_chat_templates/notes.md"} & exported
  for name in exported - {"config.json"}:
    assert (tmp_path / "export" / name).read_bytes() == (source / name).read_bytes(), name
  read(tmp_path / "export")


def test_they_survive_checkpoints(tmp_path, source):
  to_checkpoint(source, tmp_path / "checkpoint")
  assert set(MORE) <= files_of(tmp_path / "checkpoint" / "huggingface")
  to_hf(tmp_path / "checkpoint", tmp_path / "back")
  exported = files_of(tmp_path / "back")
  assert set(MORE) <= exported
  loaded = jax.tree.leaves(import_policy(tmp_path / "back", hf_toy.TIED))
  assert all((a == b).all() for a, b in zip(loaded, jax.tree.leaves(import_policy(source, hf_toy.TIED)), strict=True))
