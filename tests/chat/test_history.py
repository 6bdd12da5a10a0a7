"""Templates that rewrite the history of a conversation: it is noticed, and a new segment begins."""

from __future__ import annotations

import numpy as np
import pytest
from toys import chat_toy
from toys.chat_toy import THINKING, check_masks, context, ids_of, make_renderers, message

from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.errors import ConfigError

pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")
pytest.importorskip("jinja2", reason="the extra `hf` is not installed")

QUESTION = [message("user", "what is 12 times 7?")]
ANSWERS = [message("tool", "84"), message("tool", "eighty-four")]


@pytest.fixture(scope="module")
def renderers(tmp_path_factory) -> dict[str, ChatRenderer]:
  return make_renderers(tmp_path_factory.mktemp)


@pytest.mark.parametrize(
  "name, first, second",
  [
    ("thinking", "<think>\nhard\n</think>\n\n84<|im_end|>", "<think>\neasy\n</think>\n\n85<|im_end|>"),
    ("opened", "hard\n</think>\n\n84<|im_end|>", "easy\n</think>\n\n85<|im_end|>"),
    ("markers", "\n<think>hard</think>\n84<|user|>", "\n<think>easy</think>\n85<|user|>"),
  ],
)
def test_history_that_the_template_rewrites_starts_a_new_segment(renderers, name, first, second):
  renderer = renderers[name]
  session = renderer.start(QUESTION)
  sampled, texts = [ids_of(renderer, first), ids_of(renderer, second)], []
  history = list(QUESTION)
  for turn, action in enumerate(sampled):
    texts.append(session.act(action))
    before = session.segments
    continuation = session.observe([message("user", f"and {turn}?")])
    history += [message("assistant", texts[-1]), message("user", f"and {turn}?")]
    assert continuation.new_segment and continuation.exact
    assert continuation.token_ids.tolist() == renderer.prompt_ids(history).tolist() == context(session)
    for old, new in zip(before, session.segments):  # earlier segments stay as they were sampled
      assert old.token_ids.tolist() == new.token_ids.tolist()
  shown = renderer.tokenizer.decode(context(session))
  assert "hard" not in shown and "easy" not in shown and "84" in shown and "85" in shown
  assert len(session.segments) == 3
  check_masks(session, [action.tolist() for action in sampled])
  assert sampled[1].tolist() == session.segments[1].token_ids[session.segments[1].action_mask].tolist()


def test_thinking_of_earlier_turns_is_noticed_too(renderers):
  renderer = renderers["thinking"]
  session = renderer.start(QUESTION)
  session.act(ids_of(renderer, "<think>\nhard\n</think>\n\nsearch<|im_end|>"))
  assert not session.observe(ANSWERS).new_segment  # within one question thinking is kept
  session.act(ids_of(renderer, "84<|im_end|>"))
  continuation = session.observe([message("user", "sure?")])
  assert continuation.new_segment and "hard" not in renderer.tokenizer.decode(continuation.token_ids)


def test_an_empty_thinking_block_that_vanishes_from_history_is_a_rewriting(renderers):
  renderer = renderers["silent"]
  session = renderer.start(QUESTION)
  assert renderer.tokenizer.decode(session.prompt_ids).endswith("<think>\n\n</think>\n\n")
  session.act(ids_of(renderer, "84<|im_end|>"))
  assert session.observe(ANSWERS).new_segment


def test_a_turn_that_vanishes_is_a_rewriting(tmp_path):
  last_only = "{% for m in messages %}{% if m.role != 'assistant' or loop.index0 > messages|length - 3 %}"
  body = "{{ '<|' + m.role + '|>' + m.content }}{% endif %}{% endfor %}"
  generation = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
  renderer = ChatRenderer(HFTokenizer(chat_toy.save_folder(tmp_path, last_only + body + generation)))
  for rewrite in ("segment", "keep"):
    session = renderer.start(QUESTION, rewrite=rewrite)
    session.act(ids_of(renderer, "84<|user|>"))
    assert not session.observe([message("user", "sure?")]).new_segment
    session.act(ids_of(renderer, "85<|user|>"))
    two = [message("user", "sure?"), message("user", "really?")]
    if rewrite == "segment":
      assert session.observe(two).new_segment
      assert "84" not in renderer.tokenizer.decode(context(session))
    else:
      with pytest.raises(ConfigError, match=f"{tmp_path} does not show the last turn") as caught:
        session.observe(two)
      assert 'rewrite="segment"' in caught.value.remedy


def test_keeping_the_context_overrules_the_template(renderers):
  renderer = renderers["thinking"]
  session = renderer.start(QUESTION, rewrite="keep")
  action = ids_of(renderer, "<think>\nhard\n</think>\n\n84<|im_end|>")
  session.act(action)
  prefix = context(session)
  continuation = session.observe([message("user", "sure?")])
  assert not continuation.new_segment and not continuation.exact
  assert context(session)[: len(prefix)] == prefix and len(session.segments) == 1
  suffix = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
  assert renderer.tokenizer.decode(continuation.token_ids) == suffix


@pytest.mark.parametrize(
  "said", ["<think>hard</think>84", "\n<think>\n\nhard \n</think>\n84", "<think>\nhard</think>\n\n84"]
)
def test_white_space_that_the_template_changes_is_no_rewriting_but_shown(renderers, said):
  renderer = renderers["thinking"]
  session = renderer.start(QUESTION)
  session.act(ids_of(renderer, f"{said}<|im_end|>"))
  continuation = session.observe(ANSWERS)
  assert not continuation.new_segment and not continuation.exact
  session.act(ids_of(renderer, "84<|im_end|>"))
  continuation = session.observe(ANSWERS)
  assert not continuation.new_segment and not continuation.exact  # the context still differs
  session.act(ids_of(renderer, "84<|im_end|>"))
  assert session.observe(QUESTION).exact  # a new segment is the template's again
  session.act(ids_of(renderer, "84<|im_end|>"))
  continuation = session.observe(ANSWERS)
  assert continuation.exact and not continuation.new_segment


def test_names_of_control_tokens_in_a_turn_stay_text_in_a_new_segment(renderers):
  renderer = renderers["thinking"]
  tokenizer = renderer.tokenizer
  session = renderer.start(QUESTION)
  spelled = np.concatenate([tokenizer.encode("<think>a</think>x<|im_start|>y"), [tokenizer.id_of("<|im_end|>")]])
  assert session.act(spelled) == "<think>a</think>x<|im_start|>y"
  ids = session.observe([message("user", "and <|im_end|>?")]).token_ids.tolist()
  starts, ends = (ids.count(tokenizer.id_of(name)) for name in ("<|im_start|>", "<|im_end|>"))
  assert (starts, ends) == (4, 3)  # user, assistant, user, and the assistant's open turn
  assert "x<|im_start|>y" in tokenizer.decode(ids) and "and <|im_end|>?" in tokenizer.decode(ids)


def test_markup_of_turns_is_read_even_where_the_tokenizer_calls_it_special(tmp_path):
  folder = chat_toy.save_folder(tmp_path, THINKING)
  text = (folder / "tokenizer.json").read_text()
  (folder / "tokenizer.json").write_text(text.replace('"special": false', '"special": true'))
  renderer = ChatRenderer(HFTokenizer(folder))
  assert "<think>" in renderer.tokenizer.control_names
  session = renderer.start(QUESTION)
  session.act(ids_of(renderer, "<think>\nhard\n</think>\n\n84<|im_end|>"))
  continuation = session.observe(ANSWERS)
  assert continuation.exact and not continuation.new_segment
  session.act(ids_of(renderer, "85<|im_end|>"))
  continuation = session.observe([message("user", "<think>")])  # a user's is text
  shown, ids = renderer.tokenizer.decode(continuation.token_ids), continuation.token_ids.tolist()
  assert continuation.new_segment and "hard" not in shown
  assert "user\n<think><|im_end|>" in shown and renderer.tokenizer.id_of("<think>") not in ids
