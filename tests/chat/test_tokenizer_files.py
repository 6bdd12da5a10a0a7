"""Tokens that stand in other files than tokenizer.json: the same ids as those of transformers, or refused by name."""

from __future__ import annotations

import json
import pathlib

import pytest
from toys import chat_toy

from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.errors import ConfigError

pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `parity` is not installed")

NEXT = 367  # behind the last id of the toy's tokenizer.json
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def save(folder: pathlib.Path, settings: dict, **files: object) -> pathlib.Path:
  chat_toy.save_folder(folder, settings=settings)
  for name, content in files.items():
    chat_toy.write_json(folder / f"{name}.json", content)
  return folder


TEXT = "a <x> <y><think> <z>\n<pad> <i><|im_end|> b<|user|> <w> x<x>x <u>"


@pytest.mark.parametrize(
  "settings, files, new",
  [
    # Numbered tokens, with flags; one of them is in tokenizer.json, and its flags change.
    ({"added_tokens_decoder": {str(NEXT): {"content": "<x>", "special": True}}}, {}, ["<x>"]),
    (
      {
        "added_tokens_decoder": {
          str(NEXT + 1): {"content": "<y>", "special": False, **PLAIN, "lstrip": True},
          str(NEXT): {"content": "<x>", "special": True, **PLAIN, "rstrip": True, "single_word": True},
          "362": {"content": "</think>", "special": True, **PLAIN},
          "361": {"content": "<think>", "special": False, **PLAIN, "lstrip": True},
        }
      },
      {},
      ["<x>", "<y>"],
    ),
    # Roles and extra tokens that nobody has numbered come last, roles first.
    ({"additional_special_tokens": ["<x>", "<y>"], "pad_token": "<pad>"}, {}, ["<pad>", "<x>", "<y>"]),
    ({"extra_special_tokens": ["<y>"], "additional_special_tokens": ["<x>"]}, {}, ["<y>"]),
    ({"extra_special_tokens": {"image_token": "<i>"}, "unk_token": "<u>"}, {}, ["<u>", "<i>"]),
    ({"image_token": "<i>", "eos_token": "<w>", "sep_token": None}, {}, ["<w>", "<i>"]),
    (
      {"added_tokens_decoder": {str(NEXT): {"content": "<z>"}}, "additional_special_tokens": ["<x>"]},
      {"special_tokens_map": {"pad_token": "<pad>"}, "added_tokens": {"<w>": 5}},  # not read any more
      ["<z>", "<x>"],
    ),
    # Older folders: files of their own, which overrule the settings.
    (
      {"pad_token": "<y>"},
      {"special_tokens_map": {"pad_token": {"content": "<pad>", **PLAIN, "lstrip": True}, "eos_token": "<|user|>"}},
      ["<pad>"],
    ),
    ({}, {"special_tokens_map": {"additional_special_tokens": ["<x>", "<think>"]}}, ["<x>"]),
    ({"additional_special_tokens": ["<y>"]}, {"special_tokens_map": {"additional_special_tokens": ["<x>"]}}, ["<y>"]),
    (
      {"unk_token": "<x>"},
      {"added_tokens": {"<w>": NEXT + 1, "<x>": NEXT, "<think>": 361}},
      ["<x>", "<w>"],
    ),
  ],
)
def test_tokens_of_other_files_are_those_of_transformers(tmp_path, settings, files, new):
  folder = save(tmp_path, settings, **files)
  ours, theirs = HFTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
  assert [ours.id_of(name) for name in new] == list(range(NEXT, NEXT + len(new))) == theirs.convert_tokens_to_ids(new)
  assert ours.vocab_size == NEXT + len(new) == len(theirs)
  assert ours.token_names == theirs.special_tokens_map and ours.pad_id == theirs.pad_token_id
  assert ours.encode_with_specials(TEXT).tolist() == theirs(TEXT, add_special_tokens=False).input_ids
  assert ours.decode(ours.encode_with_specials(TEXT)) == theirs.decode(theirs(TEXT).input_ids)
  special = {token_id for token_id, token in theirs.added_tokens_decoder.items() if token.special}
  assert ours.control_ids >= special and ours.control_ids.isdisjoint(ours.encode(TEXT).tolist())


@pytest.mark.parametrize(
  "settings, files, problem",
  [
    ({"added_tokens_decoder": {str(NEXT + 3): "<x>"}}, {}, f"'<x>' the id {NEXT + 3}, but it gets {NEXT}"),
    ({"added_tokens_decoder": {"5": {"content": "<|im_end|>"}}}, {}, "'<|im_end|>' the id 5"),
    ({}, {"added_tokens": {"<x>": NEXT, "<y>": NEXT + 2}}, f"added_tokens.json of .* '<y>' the id {NEXT + 2}"),
    ({}, {"added_tokens": {"<x>": None}}, "has the id None"),
    ({"added_tokens_decoder": {str(NEXT): {"contents": "<x>"}}}, {}, "is no token"),
    ({"additional_special_tokens": [7]}, {}, "holds 7, which is no token"),
  ],
)
def test_ids_that_a_file_promises_and_the_package_cannot_give_are_refused(tmp_path, settings, files, problem):
  folder = save(tmp_path, settings, **files)
  with pytest.raises(ConfigError, match=problem.replace("|", r"\|")) as caught:
    HFTokenizer(folder)
  assert caught.value.field == "tokenizer" and str(folder) in str(caught.value)


def test_a_gap_in_tokenizer_json_is_refused_since_the_package_closes_it(tmp_path):
  folder = save(tmp_path, {})
  declared = json.loads((folder / "tokenizer.json").read_text())
  declared["added_tokens"][-1]["id"] += 1
  chat_toy.write_json(folder / "tokenizer.json", declared)
  with pytest.raises(
    ConfigError, match=f"tokenizer.json of .* '</tool_response>' the id {NEXT}, but it gets {NEXT - 1}"
  ):
    HFTokenizer(folder)


END = object()  # in the place of the id of eos_token


@pytest.mark.parametrize(
  "generation, model, stop_ids",
  [
    (None, None, (END,)),
    (None, {"eos_token_id": [3, 4, 3]}, (3, 4)),  # a list that stands in config.json only
    (None, {"eos_token_id": 5}, (5,)),
    (None, {"text_config": {"eos_token_id": 6}}, (6,)),
    (None, {"eos_token_id": None}, (END,)),
    ({"eos_token_id": [4]}, {"eos_token_id": 5}, (4,)),  # the one made for this comes first
    ({"eos_token_id": 0}, {"eos_token_id": 5}, (0,)),
    ({"eos_token_id": None}, {"eos_token_id": 5}, (END,)),  # and config.json is not asked where it says nothing
    ({}, {"eos_token_id": 5}, (END,)),
    ({"eos_token_id": []}, None, (END,)),
  ],
)
def test_the_table_of_what_ends_a_turn(tmp_path, generation, model, stop_ids):
  folder = chat_toy.save_folder(tmp_path)
  for name, content in (("generation_config.json", generation), ("config.json", model)):
    if content is not None:
      chat_toy.write_json(folder / name, content)
  tokenizer = HFTokenizer(folder)
  end = tokenizer.id_of("<|im_end|>")
  assert tokenizer.stop_ids == tuple(end if token is END else token for token in stop_ids) and tokenizer.eos_id == end

  # What `generate` of transformers reads; where it would not stop at all, the tokenizer's end token does.
  names = [name for name in ("generation_config.json", "config.json") if (folder / name).is_file()]
  if names:
    is_model = names[0] == "config.json"
    config = transformers.GenerationConfig.from_pretrained(folder, names[0], _from_model_config=is_model)
    read = config.eos_token_id
    stops = read if isinstance(read, list) else [read]
    assert tokenizer.stop_ids == (tuple(dict.fromkeys(stops)) if stops not in ([], [None]) else (end,))
