"""The calculator task: turns, grading, hostile text, prompts and splits."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.data.prompts import make_prompt_iterator, split_of
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments import arithmetic
from sao_jax.environments.base import check_step_result
from sao_jax.environments.calculator import Calculator
from sao_jax.episode import Prompt, PromptKey
from sao_jax.errors import ConfigError

TOKENIZER = ByteTokenizer()
SETTINGS = Calculator()


def begin(question: str = "3-12*7", settings: Calculator = SETTINGS):
  episode = settings.make(TOKENIZER)
  ids = asyncio.run(episode.reset(Prompt(PromptKey("calculator", 0, 0), {"question": question})))
  return episode, ids


def act(episode, action: str):
  """(observation as text, result) of an action written with special tokens."""
  result = asyncio.run(episode.step(TOKENIZER.encode_with_specials(action)))
  result = check_step_result(result, environment="calculator", vocab_size=TOKENIZER.vocab_size)
  return TOKENIZER.decode(result.observation), result


def test_an_episode_turn_by_turn():
  episode, ids = begin()
  assert ids.dtype == np.int32
  assert TOKENIZER.decode(ids) == "<|bos|><|user|>3-12*7<|end|><|assistant|>"
  assert act(episode, "<|tool_call|>12*7<|end|>")[0] == "<|observation|>84<|end|><|assistant|>"
  assert act(episode, "<|tool_call|>3-84<|end|>")[0] == "<|observation|>-81<|end|><|assistant|>"
  observation, result = act(episode, "<|answer|>-81<|end|>")
  assert (observation, result.done, result.reward) == ("", True, 1.0)
  assert result.info == {"calls": 2.0}
  assert episode.stop_ids == (TOKENIZER.end_id,)


@pytest.mark.parametrize(
  "answer, reward",
  [("-81", 1.0), ("-081", 1.0), ("81", 0.0), ("-8", 0.0), ("-811", 0.0), ("", 0.0), ("-81.", 0.0), ("-81 ", 1.0)],
)
def test_only_the_exact_integer_earns_the_reward_with_or_without_tools(answer, reward):
  episode, _ = begin()
  result = act(episode, f"<|answer|>{answer}<|end|>")[1]
  assert result.done and result.reward == reward


MALFORMED = [
  "<|tool_call|>37<|end|>",
  "<|tool_call|>3**7<|end|>",
  "<|tool_call|>9**9**9<|end|>",
  "<|tool_call|>3+4+5<|end|>",
  "<|tool_call|>3/0<|end|>",
  "<|tool_call|> 3+4<|end|>",
  "<|tool_call|>3+4\n<|end|>",
  "<|tool_call|><|end|>",
  "<|tool_call|>" + "9" * 13 + "*9<|end|>",
  "<|tool_call|>" + "9*" * 50_000 + "9<|end|>",
  "<|tool_call|>٣+٤<|end|>",
  "<|tool_call|>__import__('os').system('touch pwned')<|end|>",
  "<|tool_call|>().__class__.__bases__<|end|>",
  "<|tool_call|>3+<|bos|>4<|end|>",
  "<|tool_call|>3+4<|answer|>7<|end|>",
  "<|tool_call|>3+4",
  "3+4<|end|>",
  "<|end|>",
  "<|bos|><|end|>",
  "",
]


@pytest.mark.parametrize("action", MALFORMED)
def test_malformed_actions_are_answered_and_the_episode_goes_on(action, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  episode, _ = begin()
  observation, result = act(episode, action)
  assert observation == "<|observation|>error<|end|><|assistant|>" and not result.done
  assert act(episode, "<|answer|>-81<|end|>")[1].reward == 1.0
  assert not list(pathlib.Path(tmp_path).iterdir())


@pytest.mark.parametrize("action", [f"<|answer|>{text}<|end|>" for text in ("9**9**9", "<|answer|>-81", "-81<|bos|>")])
def test_malformed_answers_are_wrong_answers(action):
  result = act(begin()[0], action)[1]
  assert result.done and result.reward == 0.0


@pytest.mark.parametrize("action", ["<|tool_call|>1+1<|end|>", "<|tool_call|>?<|end|>"])
def test_calls_are_bounded(action):
  episode, _ = begin()
  for _ in range(SETTINGS.max_calls):
    assert not act(episode, action)[1].done
  result = act(episode, action)[1]
  assert result.done and result.reward == 0.0


def test_a_second_reset_starts_a_new_episode():
  episode, _ = begin("1+1+1")
  for _ in range(SETTINGS.max_calls):
    act(episode, "<|tool_call|>1+1<|end|>")
  asyncio.run(episode.reset(Prompt(PromptKey("calculator", 1, 0), {"question": "2+2+2"})))
  assert not act(episode, "<|tool_call|>1+1<|end|>")[1].done
  assert act(episode, "<|answer|>6<|end|>")[1].reward == 1.0


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=20))
def test_whatever_is_sampled_the_environment_answers_or_grades(ids):
  episode, _ = begin()
  result = asyncio.run(episode.step(np.array(ids, dtype=np.int32)))
  check_step_result(result, environment="calculator", vocab_size=TOKENIZER.vocab_size)


@given(st.integers(2, 6), st.integers(2, 99), st.integers(0, 10**6))
def test_questions_are_solved_as_in_arithmetic(num_operands, max_operand, seed):
  question = arithmetic.draw_question(np.random.default_rng(seed), num_operands, max_operand, "+-*")
  assert arithmetic.solve(question) == eval(question, {"__builtins__": {}})  # our own text, not a model's


@pytest.mark.parametrize("text, value", [("3+4", 7), ("-3--4", 1), ("12*-2", -24), ("007+1", 8)])
def test_calls_are_computed(text, value):
  assert arithmetic.evaluate_call(text) == value


def test_prompts_are_random_access_and_depend_on_seed_and_index_alone():
  source = SETTINGS.prompts(TOKENIZER, "train", 3)
  assert len(source) == SETTINGS.num_prompts
  prompts = [source[index] for index in range(50)]
  assert [prompt.key for prompt in prompts] == [("calculator", index, 0) for index in range(50)]
  again = SETTINGS.prompts(TOKENIZER, "train", 3)
  assert [again[np.int64(index)] for index in reversed(range(50))] == prompts[::-1]
  other = SETTINGS.prompts(TOKENIZER, "train", 4)
  assert [other[index].data for index in range(50)] != [prompt.data for prompt in prompts]
  for index in (-1, len(source)):
    with pytest.raises(IndexError):
      source[index]


def test_splits_are_disjoint_by_the_hash_of_the_question_whatever_the_seed():
  questions = {
    (split, seed): {p.data["question"] for p in itertools.islice(SETTINGS.prompts(TOKENIZER, split, seed), 200)}
    for split in ("train", "heldout")
    for seed in (0, 1)
  }
  for (split, _), texts in questions.items():
    assert {split_of(text) for text in texts} == {split}
  train, heldout = (questions[split, 0] | questions[split, 1] for split in ("train", "heldout"))
  assert not train & heldout and len(heldout) > 100


def test_heldout_questions_are_all_there_are_and_none_comes_twice():
  source = SETTINGS.prompts(TOKENIZER, "heldout", 20_260_729)
  questions = [prompt.data["question"] for prompt in source]
  digits, operators = "123456789", arithmetic.OPERATORS
  every = map("".join, itertools.product(digits, operators, digits, operators, digits))
  assert sorted(questions) == sorted(question for question in every if split_of(question) == "heldout")
  assert len(source) == len(questions) > 600
  assert [prompt.key for prompt in source] == [("calculator", index, 0) for index in range(len(source))]
  again, other = (SETTINGS.prompts(TOKENIZER, "heldout", seed) for seed in (20_260_729, 0))
  assert [again[np.int64(index)] for index in reversed(range(50))] == list(source)[:50][::-1]
  assert [other[index] for index in range(50)] != list(source)[:50]
  for index in (-1, len(source)):
    with pytest.raises(IndexError):
      source[index]


@pytest.mark.parametrize(
  "settings",
  [
    Calculator(num_prompts=500),
    Calculator(num_operands=6, max_operand=99, max_calls=5, num_prompts=500),
    Calculator(operators="++-"),
  ],
  ids=["some of all", "too many to list", "one operator twice"],
)
def test_heldout_questions_differ_whatever_the_settings(settings):
  questions = [prompt.data["question"] for prompt in settings.prompts(TOKENIZER, "heldout", 0)]
  numbers = range(arithmetic.count_questions(settings.num_operands, settings.max_operand, settings.operators))
  every = (arithmetic.question_at(n, settings.num_operands, settings.max_operand, settings.operators) for n in numbers)
  if len(numbers) <= 10_000:  # what is more is not counted out
    assert len(questions) == min(settings.num_prompts, len({one for one in every if split_of(one) == "heldout"}))
  assert len(set(questions)) == len(questions)
  assert {split_of(question) for question in questions} == {"heldout"}


def test_every_number_is_a_question_of_its_own():
  questions = [arithmetic.question_at(n, 3, 4, "+*") for n in range(arithmetic.count_questions(3, 4, "+*"))]
  assert sorted(questions) == sorted(map("".join, itertools.product("1234", "+*", "1234", "+*", "1234")))


def test_prompts_go_through_the_iterator():
  iterator = make_prompt_iterator(Calculator(num_prompts=4).prompts(TOKENIZER, "train", 0), seed=0)
  keys = [next(iterator).key for _ in range(8)]
  assert sorted(keys) == [("calculator", index, epoch) for index in range(4) for epoch in range(2)]


@pytest.mark.parametrize(
  "change",
  [{"num_operands": 1}, {"num_operands": 7}, {"max_operand": 1}, {"max_operand": 100}, {"operators": ""}]
  + [{"operators": "+/"}, {"max_calls": 1}, {"num_prompts": 0}, {"demonstration_noise": 1.5}],
)
def test_settings_that_cannot_work_are_refused_by_name(change):
  with pytest.raises(ConfigError) as caught:
    dataclasses.replace(SETTINGS, **change)
  assert caught.value.field == f"environment.{next(iter(change))}" and caught.value.remedy


def test_an_unknown_split_is_refused():
  with pytest.raises(ConfigError, match="There is no split 'test'"):
    SETTINGS.prompts(TOKENIZER, "test", 0)


def test_too_few_questions_for_a_heldout_split_are_refused():
  settings = Calculator(num_operands=2, max_operand=2, operators="+")
  assert {split_of(question) for question in ("1+1", "1+2", "2+1", "2+2")} == {"train"}
  assert settings.prompts(TOKENIZER, "train", 0)[0]
  with pytest.raises(ConfigError, match="too few different"):
    settings.prompts(TOKENIZER, "heldout", 0)[0]


def test_more_operands_need_more_turns():
  settings = Calculator(num_operands=4, operators="+")
  question = settings.prompts(TOKENIZER, "train", 0)[0].data["question"]
  assert question.count("+") == 3
  episode, _ = begin(question, settings)
  assert act(episode, f"<|answer|>{sum(map(int, question.split('+')))}<|end|>")[1].reward == 1.0


def test_states_tell_what_a_call_and_an_answer_are_worth():
  actions = ["<|tool_call|>12*7<|end|>", "<|tool_call|>3-8<|end|>", "<|answer|>-81<|end|>"]
  episode, ids = begin()
  pieces, masks = [ids], [False]
  for action in actions:
    pieces += [TOKENIZER.encode_with_specials(action), act(episode, action)[1].observation]
    masks += [True, False]
  mask = np.concatenate([np.full(len(piece), masked) for piece, masked in zip(pieces, masks)])
  states = SETTINGS.states(np.concatenate(pieces), mask)
  call, answer = TOKENIZER.tool_call_id, TOKENIZER.answer_id
  assert states[:2] == [(0, 0, 0, None, False), (0, 0, 1, call, True)] and states[5] == (0, 0, 5, call, True)
  assert states[6:11] == [(1, 0, 0, None, False), *((1, 0, place, call, True) for place in (1, 2, 3, 4))]
  assert states[11:] == [(1, 1, 0, None, False), *((1, 1, place, answer, True) for place in (1, 2, 3, 4))]
