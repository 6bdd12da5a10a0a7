"""The byte tokenizer: what text can and cannot become."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.data.tokenizer import NUM_BYTES, SPECIALS, ByteTokenizer

TOKENIZER = ByteTokenizer()


def test_ids_are_fixed():
  assert TOKENIZER.vocab_size == 272
  named = [TOKENIZER.pad_id, TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.user_id, TOKENIZER.assistant_id]
  named += [TOKENIZER.tool_call_id, TOKENIZER.observation_id, TOKENIZER.answer_id, TOKENIZER.end_id]
  assert named == list(range(256, 265))
  assert len(set(SPECIALS)) == 16
  for number, name in enumerate(SPECIALS):
    assert TOKENIZER.encode_with_specials(name).tolist() == [NUM_BYTES + number]
    assert TOKENIZER.decode([NUM_BYTES + number]) == name


@given(st.text())
def test_round_trip(text: str):
  ids = TOKENIZER.encode(text)
  assert ids.dtype == np.int32 and ids.ndim == 1
  assert TOKENIZER.decode(ids) == text == TOKENIZER.decode_bytes(ids)


@given(st.text(), st.sampled_from(SPECIALS), st.text())
def test_untrusted_text_cannot_forge_a_special_token(before: str, special: str, after: str):
  ids = TOKENIZER.encode(before + special + after)
  assert (ids < NUM_BYTES).all()


def test_template():
  ids = TOKENIZER.encode_with_specials("<|bos|><|user|>3+é<|end|><|assistant|>")
  assert ids.dtype == np.int32
  assert ids.tolist() == [257, 259, 51, 43, 195, 169, 264, 260]
  assert TOKENIZER.decode(ids) == "<|bos|><|user|>3+é<|end|><|assistant|>"
  assert TOKENIZER.encode_with_specials("").tolist() == []


def test_decode_shows_ids_without_a_token_and_refuses_negative_ones():
  """A model's vocabulary may be padded, and a policy samples from all of it: showing that must not end a run."""
  assert TOKENIZER.decode([65, 272, 271, 10**9]) == "A\ufffd<|reserved_6|>\ufffd"
  assert TOKENIZER.decode([]) == ""
  with pytest.raises(ValueError, match="-1 is negative"):
    TOKENIZER.decode([65, -1])


@pytest.mark.parametrize("ids", [[51, TOKENIZER.bos_id], [-1], [0xC3], [0xFF, 51]])
def test_decode_bytes_gives_nothing_for_what_is_not_text(ids):
  assert TOKENIZER.decode_bytes(ids) is None


def test_invalid_utf8_is_shown_not_raised():
  assert TOKENIZER.decode([0xFF, 65, TOKENIZER.end_id]) == "�A<|end|>"
