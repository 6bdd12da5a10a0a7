"""Tokenizer folders: what text can and cannot become, and what the folder's settings mean."""

from __future__ import annotations

import builtins
import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import chat_toy

from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.errors import ConfigError

pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> HFTokenizer:
  return HFTokenizer(chat_toy.save_folder(tmp_path_factory.mktemp("plain"), stop=("<|im_end|>", "<|endoftext|>")))


def edit(folder, name, change) -> None:
  path = folder / name
  value = json.loads(path.read_text())
  change(value)
  chat_toy.write_json(path, value)


def test_ids_come_from_the_settings(tokenizer):
  end, document_end = tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|endoftext|>")
  assert tokenizer.eos_id == end and tokenizer.pad_id == document_end and tokenizer.bos_id is None
  assert tokenizer.stop_ids == (end, document_end) and not tokenizer.adds_bos
  assert tokenizer.vocab_size == tokenizer.id_of("</tool_response>") + 1  # the token that was added last
  assert tokenizer.token_names == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
  with pytest.raises(ConfigError, match="no token '<bos>'"):
    tokenizer.id_of("<bos>")


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip(tokenizer, text):
  ids = tokenizer.encode(text)
  assert ids.dtype == np.int32 and ids.ndim == 1
  assert tokenizer.decode(ids) == text
  assert tokenizer.decode_bytes(ids) == (None if "\ufffd" in text else text)


@given(before=st.text("ab <|>\n"), name=st.sampled_from(chat_toy.SPECIALS), after=st.text("ab <|>\n"))
def test_untrusted_text_cannot_forge_a_control_token(tokenizer, before, name, after):
  ids = tokenizer.encode(before + name + after)
  assert tokenizer.control_ids.isdisjoint(ids.tolist())
  assert tokenizer.decode(ids) == before + name + after


@given(text=st.lists(st.sampled_from([*chat_toy.SPECIALS, *chat_toy.MARKUP, "the cat", " sat\n", "é<|", "|>"])))
def test_trusted_text_is_encoded_as_the_package_does(tokenizer, text):
  from tokenizers import Tokenizer

  reference = Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
  template = "".join(text)
  ids = tokenizer.encode_with_specials(template)
  assert ids.dtype == np.int32
  assert ids.tolist() == reference.encode(template, add_special_tokens=False).ids
  assert tokenizer.decode(ids) == template


def test_what_is_no_text_is_refused(tokenizer):
  with pytest.raises(UnicodeEncodeError):
    tokenizer.encode("a\ud83d")


def test_markup_that_is_not_special_is_read_everywhere(tokenizer):
  assert tokenizer.encode("<think>").tolist() == [tokenizer.id_of("<think>")]
  assert tokenizer.decode_bytes(tokenizer.encode("<think>a")) == "<think>a"


def test_decode_shows_what_is_no_text(tokenizer):
  end = tokenizer.stop_ids[0]
  half = tokenizer.encode("é")[0]  # the first byte of two
  assert tokenizer.decode([half, end]) == "\ufffd<|im_end|>"
  assert tokenizer.decode([end, tokenizer.vocab_size + 100, end]) == "<|im_end|>\ufffd<|im_end|>"  # a padded row
  assert tokenizer.decode([]) == ""
  with pytest.raises(ValueError, match="negative"):
    tokenizer.decode([-1])
  for ids in ([half], [end], [-1], [tokenizer.vocab_size]):
    assert tokenizer.decode_bytes(ids) is None


def test_tokens_that_look_like_markers_or_are_named_are_control_tokens_whatever_their_flag(tmp_path):
  folder = chat_toy.save_folder(tmp_path, settings={"bos_token": {"content": "<think>"}})

  def unflag(declared):
    for token in declared["added_tokens"]:
      token["special"] = False

  edit(folder, "tokenizer.json", unflag)
  tokenizer = HFTokenizer(folder)
  assert set(tokenizer.control_names) == {*chat_toy.SPECIALS, "<think>"}
  assert tokenizer.control_ids.isdisjoint(tokenizer.encode("<|user|><think>").tolist())
  assert tokenizer.encode_with_specials("<|user|>").tolist() == [tokenizer.id_of("<|user|>")]


def test_blanks_that_a_token_takes_with_it(tmp_path):
  from tokenizers import Tokenizer

  folder = chat_toy.save_folder(tmp_path)

  def greedy(declared):
    for token in declared["added_tokens"]:
      token["rstrip"] = token["lstrip"] = token["content"] == "<|im_end|>"

  edit(folder, "tokenizer.json", greedy)
  template = "a \n<|im_end|>\n b<|user|> c"
  reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
  ids = HFTokenizer(folder).encode_with_specials(template).tolist()
  assert ids == reference.encode(template, add_special_tokens=False).ids


def test_saved_truncation_and_padding_do_not_apply(tmp_path):
  from tokenizers import Tokenizer

  folder = chat_toy.save_folder(tmp_path)
  changed = Tokenizer.from_file(str(folder / "tokenizer.json"))
  changed.enable_truncation(4)
  changed.enable_padding(length=8)
  changed.save(str(folder / "tokenizer.json"))
  text = "the cat sat on the mat"
  assert HFTokenizer(folder).decode(HFTokenizer(folder).encode(text)) == text


@pytest.mark.parametrize(
  "post_processor, setting, adds", [(True, None, True), (True, False, False), (False, True, True), (False, None, False)]
)
def test_who_adds_the_begin_token(tmp_path, post_processor, setting, adds):
  settings = {} if setting is None else {"add_bos_token": setting}
  tokenizer = HFTokenizer(chat_toy.save_folder(tmp_path, bos="<s>", adds_bos=post_processor, settings=settings))
  assert tokenizer.adds_bos == adds and tokenizer.bos_id == tokenizer.id_of("<s>")
  assert tokenizer.bos_id not in tokenizer.encode("<s>a")  # not even where the post-processor would


@pytest.mark.parametrize(
  "spoil, problem",
  [
    (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    (lambda folder: (folder / "tokenizer.json").write_text("{"), "is not JSON"),
    (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "not an object"),
    (lambda folder: edit(folder, "tokenizer.json", lambda value: value.pop("model")), "cannot be read"),
    (lambda folder: edit(folder, "tokenizer_config.json", lambda value: value.pop("eos_token")), "ends a turn"),
    (lambda folder: chat_toy.write_json(folder / "config.json", {"eos_token_id": [True]}), "no token ids"),
    (lambda folder: edit(folder, "tokenizer_config.json", lambda v: v.update(eos_token=["<no>"])), "is no token"),
    (
      lambda folder: edit(folder, "tokenizer_config.json", lambda v: v.update(split_special_tokens=True)),
      "Take it out",
    ),
    (lambda folder: (folder / "tokenizer.json").rename(folder / "tokenizer.model"), "only tokenizer.model of a slow"),
    (
      lambda folder: edit(folder, "tokenizer.json", lambda v: v["pre_tokenizer"].update(add_prefix_space=True)),
      "turns cannot be joined",
    ),
  ],
)
def test_folders_that_cannot_work_are_refused(tmp_path, spoil, problem):
  folder = chat_toy.save_folder(tmp_path)
  spoil(folder)
  with pytest.raises(ConfigError, match=problem) as caught:
    HFTokenizer(folder)
  assert caught.value.field == "tokenizer" and str(folder) in str(caught.value)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
  folder = chat_toy.save_folder(tmp_path)
  monkeypatch.delitem(sys.modules, "tokenizers")
  real_import = builtins.__import__

  def without_the_package(name, *arguments, **keywords):
    if name == "tokenizers":
      raise ImportError(name)
    return real_import(name, *arguments, **keywords)

  monkeypatch.setattr(builtins, "__import__", without_the_package)
  with pytest.raises(ConfigError, match=r"'\.\[hf\]'"):
    HFTokenizer(folder)
