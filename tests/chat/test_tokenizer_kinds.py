"""Tokenizers of the kinds that families have: the ids and texts of AutoTokenizer, or refused by name."""

from __future__ import annotations

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import chat_toy

from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.errors import ConfigError

tokenizers = pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `parity` is not installed")
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors  # noqa: E402

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FLAGGED = [
  AddedToken("<l>", lstrip=True, normalized=False),
  AddedToken("<r>", rstrip=True, normalized=False, special=True),
  AddedToken("<w>", single_word=True, normalized=False),
  AddedToken("<|w|>", single_word=True, rstrip=True, normalized=False, special=True),
  AddedToken("<n>", normalized=True),
  AddedToken("\u212bng", normalized=True),  # not the form that NFC gives it
  AddedToken("<l>x", normalized=False),  # longer than another that begins as it does
]


def split(*patterns: str) -> pre_tokenizers.Sequence:
  parts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
  return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level(folder: pathlib.Path, name: str, **parts: object) -> pathlib.Path:
  """The toy's vocabulary with another pipeline, and added tokens with all flags."""
  path = chat_toy.save_folder(folder, bos="<s>", settings={"tokenizer_class": name}) / "tokenizer.json"
  tokenizer = tokenizers.Tokenizer.from_file(str(path))
  for part, value in parts.items():
    setattr(tokenizer, part, value)
  tokenizer.add_tokens(FLAGGED)
  tokenizer.save(str(path))
  return folder


def sentencepiece(folder: pathlib.Path, prepend: str, decoder: decoders.Decoder) -> pathlib.Path:
  """Pieces with `▁` for blanks, and bytes for what has no piece."""
  pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdeilmnotx12.", "▁a", "in", "▁t"]
  vocabulary = {piece: place for place, piece in enumerate(pieces)}
  merges = [("▁", "a"), ("i", "n"), ("▁", "t")]
  tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
  tokenizer.decoder = decoder
  tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
  tokenizer.add_tokens(FLAGGED)
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / "tokenizer.json"))
  roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
  chat_toy.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **roles})
  return folder


FUSED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
BOS = processors.Sequence(
  [
    processors.ByteLevel(trim_offsets=False),
    processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 361)]),
  ]
)
KINDS = {
  "Qwen": lambda folder: byte_level(
    folder, "Qwen2Tokenizer", normalizer=normalizers.NFC(), pre_tokenizer=split(WORDS + r"\p{N}" + REST)
  ),
  "Llama 3": lambda folder: byte_level(
    folder, "PreTrainedTokenizerFast", pre_tokenizer=split(WORDS + r"\p{N}{1,3}" + REST), post_processor=BOS
  ),
  "DeepSeek": lambda folder: byte_level(
    folder, "LlamaTokenizerFast", pre_tokenizer=split(r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", WORDS + REST[1:])
  ),
  "no prefix": lambda folder: sentencepiece(folder, "never", decoders.Sequence(FUSED)),
}
PIECES = (
  *(
    "the cat",
    " sat's 12345",
    "\n\n",
    " \t",
    "你好。",
    "é e\u0301",
    "\u212bngstrom",
    "👩‍👩‍👧",
    "_x<|",
    "a in t.",
    "\ufffd",
    "\x1c",
  ),
  *(token.content for token in FLAGGED),
  *("<s>", "</s>", "<|im_end|>", "<think>"),
)
TEXTS = st.lists(st.sampled_from(PIECES))


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
  folder = KINDS[request.param](tmp_path_factory.mktemp("kind"))
  return HFTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)


@given(text=TEXTS.map("".join) | st.text(st.characters(exclude_categories=["Cs"])))
def test_text_has_the_ids_of_transformers_and_every_part_of_them_its_text(pair, text):
  ours, theirs = pair
  ids = ours.encode_with_specials(text).tolist()
  assert ids == theirs(text, add_special_tokens=False).input_ids
  for end in range(len(ids) + 1):  # as they are sampled, one after the other
    assert ours.decode(ids[:end]) == theirs.decode(ids[:end])
  plain = ours.encode(text)
  assert ours.control_ids.isdisjoint(plain.tolist()) and ours.decode(plain).count("<s>") == text.count("<s>")


@given(data=st.data())
def test_any_ids_have_the_text_of_transformers(pair, data):
  ours, theirs = pair
  assert len(theirs) == ours.vocab_size
  ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1)))
  assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("kind", ["Llama 3", "Qwen"])
def test_who_begins_a_sequence_is_what_the_post_processor_says(tmp_path, kind):
  folder = KINDS[kind](tmp_path)
  ours, theirs = HFTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
  assert ours.adds_bos == (theirs("a").input_ids[0] == ours.bos_id) == (kind == "Llama 3")


@pytest.mark.parametrize("clean", [True, False])
def test_no_blanks_are_cleaned_up(tmp_path, clean):
  folder = chat_toy.save_folder(tmp_path, settings={"clean_up_tokenization_spaces": clean})
  ours, theirs = HFTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
  ids = ours.encode("it 's , no .")
  assert ours.decode(ids) == theirs.decode(ids) == "it 's , no ."


@pytest.mark.parametrize("prepend", ["first", "always"])
def test_a_blank_before_the_text_is_refused(tmp_path, prepend):
  folder = sentencepiece(tmp_path, prepend, decoders.Sequence([*FUSED, decoders.Strip(" ", left=1)]))
  with pytest.raises(ConfigError, match="turns cannot be joined") as caught:
    HFTokenizer(folder)
  assert str(folder) in caught.value.problem and caught.value.remedy


def test_so_is_the_older_form_of_it_and_what_is_no_tokenizer_of_bytes(tmp_path):
  folder = sentencepiece(tmp_path / "older", "never", decoders.Sequence([*FUSED, decoders.Strip(" ", left=1)]))
  declared = json.loads((folder / "tokenizer.json").read_text())
  blanks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
  declared |= {
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, blanks]},
    "pre_tokenizer": None,
  }
  chat_toy.write_json(folder / "tokenizer.json", declared)
  words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
  words.pre_tokenizer = pre_tokenizers.Whitespace()
  words.add_special_tokens(["[SEP]"])
  (tmp_path / "words").mkdir()
  words.save(str(tmp_path / "words" / "tokenizer.json"))
  chat_toy.write_json(tmp_path / "words" / "tokenizer_config.json", {"eos_token": "[SEP]"})
  for name in ("older", "words"):
    with pytest.raises(ConfigError, match="turns cannot be joined"):
      HFTokenizer(tmp_path / name)
