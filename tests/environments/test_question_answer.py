"""Questions of a data set: posed, answered and scored, in tokens and as a chat; splits; the README's example."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import re

import numpy as np
import pytest
from toys import chat_toy, tfds_toy
from toys.paths import REPOSITORY

from sao_jax.chat.messages import text_of
from sao_jax.data.prompts import split_of
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.answers import INSTRUCTION, encode_question, read_answer
from sao_jax.environments.base import DemonstratingSpec
from sao_jax.environments.question_answer import QuestionAnswer
from sao_jax.episode import BadPrompt, GraderFailure, Prompt, PromptKey
from sao_jax.errors import ConfigError
from sao_jax.evaluation.fixed_policy import check_prompts

TOKENIZER = ByteTokenizer()


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  return str(path)


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
  rows = [{"question": f"{number}+1", "answer": str(number + 1)} for number in range(60)]
  return write(tmp_path_factory.mktemp("sums") / "sums.jsonl", rows)


@pytest.fixture(scope="module")
def settings(sums):
  settings = QuestionAnswer(sums, name="sums", scorer="integer", grader_processes=1)
  yield settings
  settings.grading.pool.close()


def play(settings, prompt, action):
  """(the prompt's ids, the result of the one step)."""

  async def episode():
    environment = settings.make(settings.tokenizer())
    ids = await environment.reset(prompt)
    return ids, await environment.step(settings.tokenizer().encode_with_specials(action))

  return asyncio.run(episode())


@pytest.mark.parametrize(
  "action, reward, answered",
  [("hm<|answer|> 4<|end|>", 1, 1), ("<|answer|>5<|end|>", 0, 1), ("4<|end|>", 0, 0), ("<|answer|>4", 0, 0)],
)
def test_an_episode_in_tokens(settings, action, reward, answered):
  ids, result = play(settings, Prompt(PromptKey("sums", 0, 0), {"question": "3+1", "answer": "4"}), action)
  assert TOKENIZER.decode(ids) == "<|bos|><|user|>3+1<|end|><|assistant|>"
  assert (result.done, result.reward, result.info) == (True, reward, {"answered": answered})


def test_a_right_answer_of_a_users_scorer_that_cannot_take_it_is_a_failure_of_the_grader(sums):
  settings = QuestionAnswer(sums, scorer="sao_jax.rewards.scorers:integer_answer", grader_processes=1)
  try:
    with pytest.raises(GraderFailure, match="no integer"):
      play(settings, Prompt(PromptKey("sums", 0, 0), {"question": "3+1", "answer": "four"}), "<|answer|>4<|end|>")
  finally:
    settings.grading.pool.close()


def test_a_tenth_is_held_out_by_the_hash_of_the_questions_whatever_the_seed(settings):
  train, heldout = (settings.prompts(TOKENIZER, split, 0) for split in ("train", "heldout"))
  assert len(train) + len(heldout) == 60 and 0 < len(heldout) < 20
  for split, prompts in (("train", train), ("heldout", heldout)):
    assert [prompts[index].key for index in range(len(prompts))] == [
      ("sums", index, 0) for index in range(len(prompts))
    ]
    assert all(split_of(prompts[index].data["question"]) == split for index in range(len(prompts)))
  assert settings.prompts(TOKENIZER, "train", 1)[3] == train[3]


def test_a_heldout_set_of_its_own(sums, tmp_path):
  other = write(tmp_path / "test.jsonl", [{"question": "9+1", "answer": "10"}])
  settings = QuestionAnswer(sums, heldout_data=other)
  assert len(settings.prompts(TOKENIZER, "train", 0)) == 60
  assert [prompt.data["answer"] for prompt in settings.prompts(TOKENIZER, "heldout", 0)] == ["10"]


def test_damaged_records_are_trained_on_where_they_are_skipped_and_counted(tmp_path):
  path = tmp_path / "x.jsonl"
  path.write_text('{"question": 7, "answer": 1}\n{"question": " ", "answer": 1}\nnonsense\n')
  train = QuestionAnswer(str(path)).prompts(TOKENIZER, "train", 0)
  assert len(train) == 3
  for index in range(3):
    with pytest.raises(BadPrompt):
      train[index]


def test_prompts_of_a_tensorflow_data_set(tmp_path):
  folder = str(tfds_toy.prepare(tmp_path))
  settings = QuestionAnswer(
    *("tfds:sao_tiny_questions", "tiny", "text", "label"),
    split="train[:80%]",
    heldout_split="train[80%:]",
    tfds_folder=folder,
  )
  train, heldout = (settings.prompts(TOKENIZER, split, 0) for split in ("train", "heldout"))
  found = sorted(prompts[index].data["answer"] for prompts in (train, heldout) for index in range(len(prompts)))
  assert found == [*range(10)] and len(heldout) == 2


@pytest.mark.parametrize(
  "answer_in, system_prompt, shown, said, reward",
  [
    ("tags", None, "between <answer> and </answer>", "<think>5?</think> so <answer>4</answer>", 1.0),
    ("tags", "Add.", "Add.", "4", 0.0),
    ("reply", None, None, "<think>5?</think>\n4", 1.0),
    ("reply", "", None, "<think>4", 0.0),
  ],
)
def test_a_chat(sums, tmp_path, answer_in, system_prompt, shown, said, reward):
  pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")
  folder = str(chat_toy.save_folder(tmp_path, chat_toy.PLAIN))
  chat = QuestionAnswer(sums, answer_in=answer_in, system_prompt=system_prompt, tokenizer_folder=folder)
  prompt = Prompt(PromptKey("question_answer", 0, 0), {"question": "3+1", "answer": ["four", "4"]})
  ids, result = play(chat, prompt, f"{said}<|im_end|>")
  text = chat.tokenizer().decode(ids)
  assert "3+1" in text and ("system" in text) == bool(shown) and (shown or "") in text
  assert result.reward == reward and result.done

  # The expert says the right answer in the form that is asked for.
  demonstration = chat.demonstration(prompt, chat.tokenizer(), np.random.default_rng(0))
  assert chat.tokenizer().decode(demonstration.token_ids).startswith(text)
  assert demonstration.reward == 1.0
  chat.grading.pool.close()


def test_the_expert_gives_the_right_answer(settings):
  assert isinstance(settings, DemonstratingSpec)
  prompt = settings.prompts(TOKENIZER, "train", 0)[2]
  demonstration = settings.demonstration(prompt, TOKENIZER, np.random.default_rng(0))
  text = TOKENIZER.decode(demonstration.token_ids[demonstration.action_mask])
  assert (text, demonstration.reward) == (f"<|answer|>{prompt.data['answer']}<|end|>", 1.0)


def test_settings_travel_to_other_processes_without_what_was_opened(settings):
  settings.prompts(TOKENIZER, "train", 0)
  copy = pickle.loads(pickle.dumps(settings))
  assert copy == settings and "_splits" not in vars(copy)


@pytest.mark.parametrize(
  "change, field",
  [
    ({"scorer": "no_such"}, "environment.scorer"),
    ({"answer_in": "box"}, "environment.answer_in"),
    ({"system_prompt": "Add."}, "environment.system_prompt"),
  ],
)
def test_settings_that_cannot_work_are_refused(sums, change, field):
  with pytest.raises(ConfigError, match=field):
    QuestionAnswer(sums, **change)


def test_the_example_of_the_readme(tmp_path, monkeypatch):
  readme = (REPOSITORY / "sao_jax/environments/README.md").read_text(encoding="utf-8")
  section = readme.partition("\n## Questions of a data set\n")[2].partition("\n## ")[0]
  (block,) = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
  (line,) = re.findall(r"`(\{.*\})`", section)
  assert len(block.splitlines()) <= 10

  monkeypatch.chdir(tmp_path)
  (tmp_path / "questions.jsonl").write_text("".join(line.replace("3+4", f"{n}+4") + "\n" for n in range(40)))
  names: dict = {}
  exec(compile(block, "questions_config.py", "exec"), names)
  config = names["get_config"]()
  check_prompts(config)
  assert config.environment.prompts(TOKENIZER, "train", 0)[0].data["answer"] == 7


def test_a_right_answer_that_cannot_be_read_is_a_bad_prompt_before_anything_is_said(sums):
  settings = QuestionAnswer(sums, name="sums", scorer="json", grader_processes=1)
  bad = Prompt(PromptKey("sums", 7, 0), {"question": "3+1", "answer": "{4"})
  try:
    for tried in (
      lambda: asyncio.run(settings.make(TOKENIZER).reset(bad)),
      lambda: settings.demonstration(bad, TOKENIZER, np.random.default_rng(0)),
    ):
      with pytest.raises(BadPrompt, match="Record 7 of sums has the right answer '{4'") as problem:
        tried()
      assert problem.value.reason == "answer_unreadable"
    _, result = play(
      settings, dataclasses.replace(bad, data={"question": "3+1", "answer": "4"}), "<|answer|>4.0<|end|>"
    )
    assert result.reward == 1.0
  finally:
    settings.grading.pool.close()


def test_a_right_answer_is_looked_at_before_a_token_is_sampled_whatever_the_scorer(settings):
  with pytest.raises(BadPrompt, match="'four', which 'integer' cannot read"):
    asyncio.run(settings.make(TOKENIZER).reset(Prompt(PromptKey("sums", 0, 0), {"question": "3+1", "answer": "four"})))


SYSTEM, ASKED = {"role": "system", "content": "Add."}, {"role": "user", "content": "3+1"}


@pytest.mark.parametrize(
  "question, roles, system",
  [
    ([ASKED], ["system", "user"], INSTRUCTION),
    ([SYSTEM, ASKED], ["system", "user"], f"Add.\n\n{INSTRUCTION}"),
    ([ASKED, {"role": "assistant", "content": "5"}, ASKED], ["system", "user", "assistant", "user"], INSTRUCTION),
  ],
)
def test_a_question_may_be_a_conversation_in_a_chat(tmp_path, question, roles, system):
  pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")
  path = write(tmp_path / "chats.jsonl", [{"question": question, "answer": "4"}])
  folder = str(chat_toy.save_folder(tmp_path, chat_toy.PLAIN))
  chat = QuestionAnswer(path, heldout_data=path, tokenizer_folder=folder, grader_processes=1)
  prompt = chat.prompts(chat.tokenizer(), "train", 0)[0]
  messages = chat.messages(prompt.data["question"])
  assert [message["role"] for message in messages] == roles and messages[0]["content"] == system
  demonstration = chat.demonstration(prompt, chat.tokenizer(), np.random.default_rng(0))
  assert "3+1" in chat.tokenizer().decode(demonstration.token_ids) and demonstration.reward == 1.0


def test_the_byte_tokenizer_takes_one_message_and_no_conversation(tmp_path):
  rows = [[ASKED], [SYSTEM, ASKED], [{"role": "robot", "content": "x"}], [], {"content": "x"}]
  path = write(tmp_path / "chats.jsonl", [{"question": row, "answer": "4"} for row in rows])
  settings = QuestionAnswer(path, heldout_data=path)
  prompts = settings.prompts(TOKENIZER, "train", 0)
  assert TOKENIZER.decode(encode_question(TOKENIZER, text_of(prompts[0].data["question"]))).count("3+1") == 1
  for index in range(1, 5):
    with pytest.raises(BadPrompt) as problem:
      prompts[index]
    assert problem.value.reason == "prompt_not_text"


def test_an_answer_in_thinking_that_goes_on_is_none():
  assert read_answer("<think>a</think><think><answer>4</answer>") is None
  assert read_answer("<think>a</think><answer>4</answer>") == "4"


def test_half_a_surrogate_pair_is_refused_and_counted_like_other_damage(tmp_path):
  path = tmp_path / "odd.jsonl"
  path.write_text('{"question": "\\ud800", "answer": "1"}\n', encoding="utf-8")
  settings = QuestionAnswer(str(path))
  assert sum(len(settings.prompts(TOKENIZER, split, 0)) for split in ("train", "heldout")) == 1
