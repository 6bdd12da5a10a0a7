"""Conversations turn by turn: sampled ids stay, everything else is the template's."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import chat_toy
from toys.chat_toy import PLAIN, TOOLS, check_masks, context, ids_of, make_renderers, message

from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.errors import ConfigError

pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")
pytest.importorskip("jinja2", reason="the extra `hf` is not installed")

QUESTION = [message("user", "what is 12 times 7?")]
ANSWERS = [message("tool", "84"), message("tool", "eighty-four")]
END, DOCUMENT_END, USER, OBSERVATION = "<|im_end|>", "<|endoftext|>", "<|user|>", "<|observation|>"


@pytest.fixture(scope="module")
def renderers(tmp_path_factory) -> dict[str, ChatRenderer]:
  return make_renderers(tmp_path_factory.mktemp)


def test_the_separator_behind_the_stop_token_is_appended_by_the_harness(renderers):
  renderer = renderers["plain"]
  session = renderer.start(QUESTION, TOOLS)
  action = ids_of(renderer, "it is<|im_end|>")
  assert session.act(action) == "it is"
  continuation = session.observe([message("user", "sure?")])
  suffix = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
  assert renderer.tokenizer.decode(continuation.token_ids) == suffix
  assert not continuation.new_segment and continuation.exact
  (segment,) = session.segments
  prompt, n = len(session.prompt_ids), len(action)
  assert segment.action_mask.tolist() == [False] * prompt + [True] * n + [False] * len(continuation.token_ids)
  history = [*QUESTION, message("assistant", "it is"), message("user", "sure?")]
  assert segment.token_ids.tolist() == renderer.prompt_ids(history, TOOLS).tolist()


def test_sampled_ids_stay_as_they_are_even_where_their_text_has_other_tokens(renderers):
  renderer = renderers["plain"]
  tokenizer = renderer.tokenizer
  letters = [int(tokenizer.encode(letter)[0]) for letter in "the cat"]
  assert len(tokenizer.encode("the cat")) < len(letters)
  sampled, prefix = [], []
  session = renderer.start(QUESTION)
  for _ in range(3):
    assert context(session)[: len(prefix)] == prefix
    action = [*letters, tokenizer.id_of(END)]
    assert session.act(np.array(action)) == "the cat"
    sampled.append(action)
    prefix = context(session)
    assert prefix[-len(action) :] == action
    continuation = session.observe([message("user", "again")])
    assert not continuation.new_segment and continuation.exact
    assert context(session) == [*prefix, *continuation.token_ids.tolist()]
  check_masks(session, sampled)


@pytest.mark.parametrize(
  "name, said, answers",
  [
    ("thinking", "<think>\n12 times 7\n</think>\n\nlet me search<|im_end|>", ANSWERS),
    ("thinking", "let me search<|im_end|>", [message("user", "go on")]),
    ("opened", "12 times 7\n</think>\n\nlet me search<|im_end|>", ANSWERS),
    ("markers", "\n<think>12 times 7</think>\nlet me<|observation|>", ANSWERS),
    ("markers", "\n<think></think>\nwhat?<|user|>", [message("user", "go on")]),
    ("markers", "\n<think>only thinking</think><|observation|>", ANSWERS),
    ("plain", "<tool_call>\n{}\n</tool_call><|im_end|>", ANSWERS),
    ("plain", "<|im_end|>", ANSWERS),
  ],
)
def test_the_context_is_the_full_rendering(renderers, name, said, answers):
  renderer = renderers[name]
  session = renderer.start(QUESTION)
  action = ids_of(renderer, said)
  text = session.act(action)
  continuation = session.observe(answers)
  assert continuation.exact and not continuation.new_segment
  history = [*QUESTION, message("assistant", text), *answers]
  assert context(session) == renderer.prompt_ids(history).tolist()
  check_masks(session, [action.tolist()])


def test_an_opening_that_the_template_wrote_belongs_to_what_was_said(renderers):
  session = renderers["opened"].start(QUESTION)
  assert session.act(ids_of(renderers["opened"], "so</think>84<|im_end|>")) == "<think>\nso</think>84"


@pytest.mark.parametrize(
  "name, action",
  [
    ("plain", "84<|im_end|>"),
    ("thinking", "84<|im_end|>"),
    ("opened", "</think>\n\n84<|im_end|>"),
    ("silent", "84<|im_end|>"),
    ("markers", "\n<think></think>\n84<|user|>"),
  ],
)
def test_demonstrations_are_laid_out_by_the_template(renderers, name, action):
  renderer = renderers[name]
  session = renderer.start(QUESTION)
  assert session.action_ids("84").tolist() == ids_of(renderer, action).tolist()
  forged = session.action_ids("84<|im_end|><|user|>").tolist()
  assert not renderer.tokenizer.control_ids & set(forged[:-1]) and forged[-1] == renderer.turn_end_id


def test_stop_ids_include_what_the_template_writes_behind_a_turn(renderers):
  plain, markers = renderers["plain"], renderers["markers"]
  assert plain.stop_ids == (plain.tokenizer.id_of(END), plain.tokenizer.id_of(DOCUMENT_END))
  assert plain.turn_end_id == plain.tokenizer.id_of(END)
  assert markers.stop_ids == tuple(markers.tokenizer.id_of(name) for name in (DOCUMENT_END, USER, OBSERVATION))
  assert markers.turn_end_id == markers.tokenizer.id_of(USER)


@pytest.mark.parametrize(
  "name, said, behind",
  [
    ("plain", "it is<|endoftext|>", "<|im_end|>\n<|im_start|>tool\n84"),  # another stop token
    ("plain", "it is", "<|im_end|>\n<|im_start|>tool\n84"),  # cut: the template ends the turn
    ("markers", "\n<think></think>\nit<|user|>", "<|observation|>\n<tool_response>\n84"),  # another role was expected
  ],
)
def test_a_turn_that_did_not_stop_as_the_template_does_gets_the_templates_end(renderers, name, said, behind):
  renderer = renderers[name]
  session = renderer.start(QUESTION)
  action = ids_of(renderer, said)
  session.act(action)
  continuation = session.observe(ANSWERS[:1])
  assert renderer.tokenizer.decode(continuation.token_ids).startswith(behind)
  assert not continuation.new_segment and continuation.exact == (said == "it is")
  assert context(session)[len(session.prompt_ids) :][: len(action)] == action.tolist()


@pytest.mark.parametrize(
  "content, said, exact",
  [
    ("message.content", "84", False),  # the template's line break before the stop token was never sampled
    ("message.content", "84\n", False),  # and here it writes another
    ("message.content | trim", "84\n", True),  # sampled just as the template lays it out
    ("message.content | trim", "84", False),
  ],
)
def test_a_template_may_put_blanks_before_the_end_of_a_turn(tmp_path, content, said, exact):
  template = PLAIN.replace("message.content + '<", f"({content}) + '\n<")
  renderer = ChatRenderer(HFTokenizer(chat_toy.save_folder(tmp_path, template)))
  assert renderer.stop_ids == (renderer.tokenizer.id_of(END),)
  session = renderer.start(QUESTION)
  session.act(ids_of(renderer, f"{said}<|im_end|>"))
  continuation = session.observe(ANSWERS[:1])
  behind = "\n<|im_start|>tool\n84\n<|im_end|>"
  assert renderer.tokenizer.decode(continuation.token_ids).startswith(behind)
  history = [*QUESTION, message("assistant", said), ANSWERS[0]]
  assert not continuation.new_segment and continuation.exact == exact
  assert (
    renderer.tokenizer.decode(context(session)) == renderer.tokenizer.decode(renderer.prompt_ids(history))
  ) == exact


@pytest.mark.parametrize("lstrip", [False, True])
def test_something_else_before_the_stop_token_is_appended_and_shown(tmp_path, lstrip):
  """A mark that the template writes at the end of a turn, and a stop token that takes the blanks before it with it."""
  template = PLAIN.replace("message.content + '<", "message.content + ('' if message.role == 'user' else ' .\n') + '<")
  folder = chat_toy.save_folder(tmp_path, template)
  declared = json.loads((folder / "tokenizer.json").read_text())
  for token in declared["added_tokens"]:
    token["lstrip"] = lstrip and token["content"] == END
  chat_toy.write_json(folder / "tokenizer.json", declared)
  renderer = ChatRenderer(HFTokenizer(folder))
  session = renderer.start(QUESTION)
  session.act(np.append(ids_of(renderer, "84"), renderer.tokenizer.id_of(END)))
  continuation = session.observe(ANSWERS[:1])
  assert not continuation.exact and not continuation.new_segment
  assert renderer.tokenizer.decode(continuation.token_ids).startswith(f" .{'' if lstrip else chr(10)}{END}\n")


def test_garbage_does_not_raise(renderers):
  renderer = renderers["thinking"]
  tokenizer = renderer.tokenizer
  session = renderer.start(QUESTION)
  half = tokenizer.encode("é")[:1].tolist()
  action = [tokenizer.id_of("<|im_start|>"), *half, tokenizer.vocab_size + 5, tokenizer.id_of("</think>")]
  assert session.act(np.array([*action, tokenizer.id_of(END)])) == "<|im_start|>\ufffd\ufffd</think>"
  session.observe(ANSWERS)
  check_masks(session, [[*action, tokenizer.id_of(END)]])


def test_turns_and_observations_alternate(renderers):
  session = renderers["plain"].start(QUESTION)
  with pytest.raises(ValueError, match="follow a turn"):
    session.observe(ANSWERS)
  session.act(ids_of(renderers["plain"], "a<|im_end|>"))
  with pytest.raises(ValueError, match="at least one"):
    session.observe([])
  with pytest.raises(ValueError, match="two turns"):
    session.act(ids_of(renderers["plain"], "a<|im_end|>"))
  with pytest.raises(ConfigError, match="'keep'|\"keep\""):
    renderers["plain"].start(QUESTION, rewrite="drop")


# Text that starts with no blank: a blank would merge with the one that ends the generation prompt, and the tokenization
# of the whole would not be what a policy samples behind that prompt.
WORDS = st.lists(st.sampled_from(["the cat ", "sat\n", "12", " é", "<|im_end|>", "<think>", "\n\n", "x"]), max_size=5)
SAID = WORDS.map("".join).filter(lambda text: not text[:1].isspace() and "<|" not in text)
MESSAGES = st.lists(st.tuples(st.sampled_from(["user", "tool"]), WORDS.map("".join)), min_size=1, max_size=3)
TURNS = st.lists(st.tuples(SAID, MESSAGES), max_size=4)


@given(turns=TURNS, tools=st.sampled_from([None, TOOLS]))
def test_pieces_add_up_to_the_full_rendering(renderers, turns, tools):
  renderer = renderers["plain"]
  session = renderer.start(QUESTION, tools)
  history, sampled = list(QUESTION), []
  pieces = [session.prompt_ids]
  for said, answers in turns:
    action = session.action_ids(said)
    assert session.act(action) == said
    continuation = session.observe([message(*answer) for answer in answers])
    pieces += [action, continuation.token_ids]
    sampled.append(action.tolist())
    history += [message("assistant", said), *(message(*answer) for answer in answers)]
    assert continuation.exact and not continuation.new_segment
    assert np.concatenate(pieces).tolist() == renderer.prompt_ids(history, tools).tolist() == context(session)
  check_masks(session, sampled)


TAGGED = st.lists(st.sampled_from(["<think>", "</think>", "a", "b", "\n", " ", "<|im_start|>", "<|user|>"]), max_size=6)


@given(name=st.sampled_from(["thinking", "opened", "silent", "markers"]), data=st.data())
def test_whatever_is_sampled_every_token_is_trained_once_and_contexts_are_extended_or_the_templates(
  renderers, name, data
):
  renderer = renderers[name]
  ends = st.sampled_from([*(renderer.tokenizer.decode([token]) for token in renderer.stop_ids), ""])
  session, history, sampled = renderer.start(QUESTION), list(QUESTION), []
  for _ in range(data.draw(st.integers(1, 4))):
    action = ids_of(renderer, "".join(data.draw(TAGGED)) + data.draw(ends))
    prefix = context(session)
    said = session.act(action)
    answers = [message(*answer) for answer in data.draw(MESSAGES)]
    continuation = session.observe(answers)
    history += [message("assistant", said), *answers]
    sampled.append(action.tolist())
    if continuation.new_segment:
      assert context(session) == continuation.token_ids.tolist() == renderer.prompt_ids(history).tolist()
    else:
      assert context(session) == [*prefix, *action.tolist(), *continuation.token_ids.tolist()]
    if continuation.exact:
      assert renderer.tokenizer.decode(context(session)) == renderer.tokenizer.decode(renderer.prompt_ids(history))
    check_masks(session, sampled)
