"""Tasks of the reasoning-gym package: scored by their own scorer, never by evaluating what a model wrote."""

from __future__ import annotations

import ast
import asyncio
import builtins
import dataclasses
import inspect
import json
import math
import re
import sys
import textwrap

import numpy as np
import pytest
from toys import graders

from sao_jax.data.prompts import split_of
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.base import check_step_result
from sao_jax.environments.reasoning_gym import ReasoningGym, corrupt, score
from sao_jax.environments.reasoning_gym_tasks import UNSAFE_TASKS
from sao_jax.episode import GraderFailure
from sao_jax.errors import ConfigError
from sao_jax.rewards.grader_pool import GraderPool

TOKENIZER = ByteTokenizer()
CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
SETTINGS = ReasoningGym("chain_sum", CHAIN_SUM)


@pytest.fixture(autouse=True)
def package():
  pytest.importorskip("reasoning_gym", reason="the extra `envs` is not installed")


def run_episode(prompt, action: str, settings: ReasoningGym = SETTINGS):
  async def episode():
    environment = settings.make(TOKENIZER)
    ids = await environment.reset(prompt)
    return ids, await environment.step(TOKENIZER.encode_with_specials(action))

  ids, result = asyncio.run(episode())
  return ids, check_step_result(result, environment=settings.name, vocab_size=TOKENIZER.vocab_size)


def first_prompt(settings: ReasoningGym = SETTINGS):
  return settings.prompts(TOKENIZER, "train", 0)[0]


def test_an_episode():
  prompt = first_prompt()
  answer = SETTINGS.entry(prompt)["answer"]
  ids, result = run_episode(prompt, f"<|answer|>{answer}<|end|>")
  assert ids.dtype == np.int32
  assert TOKENIZER.decode(ids) == f"<|bos|><|user|>{prompt.data['question']}<|end|><|assistant|>"
  assert (result.done, result.reward, result.observation.tolist()) == (True, 1.0, [])
  assert prompt.key == ("reasoning_gym/chain_sum", 0, 0) and prompt.key.environment == SETTINGS.make(TOKENIZER).name
  assert json.loads(json.dumps(prompt.data)) == prompt.data


@pytest.mark.parametrize(
  "action, reward",
  [
    ("so it is <|answer|>{}<|end|>", 1.0),  # thinking before the answer
    ("<|answer|>12345<|answer|> {} <|end|>", 1.0),  # the last answer counts
    ("{}<|end|>", 0.0),  # no answer token
    ("<|answer|>{}", 0.0),  # no end of turn
    ("<|answer|><|end|>", 0.0),
    ("<|answer|>98765<|end|>", 0.0),
    ("<|answer|>{}<|user|><|end|>", 0.0),
    ("<|end|>", 0.0),
    ("", 0.0),
  ],
)
def test_what_counts_as_the_answer(action, reward):
  prompt = first_prompt()
  assert run_episode(prompt, action.format(SETTINGS.entry(prompt)["answer"]))[1].reward == reward


@pytest.mark.parametrize(
  "task, config", [("letter_counting", {"min_words": 1, "max_words": 3}), ("spell_backward", {})]
)
def test_other_tasks(task, config):
  settings = ReasoningGym(task, config)
  prompt = first_prompt(settings)
  assert run_episode(prompt, f"<|answer|>{settings.entry(prompt)['answer']}<|end|>", settings)[1].reward == 1.0


def test_prompts_are_random_access_and_reproducible():
  source = SETTINGS.prompts(TOKENIZER, "train", 7)
  prompts = [source[index] for index in range(30)]
  again = ReasoningGym("chain_sum", CHAIN_SUM).prompts(TOKENIZER, "train", 7)
  assert [again[index] for index in reversed(range(30))] == prompts[::-1]
  assert len(source) == SETTINGS.num_prompts
  for index in (-1, len(source)):
    with pytest.raises(IndexError):
      source[index]


def test_splits_are_disjoint_whatever_the_seed():
  questions = {
    (split, seed): [SETTINGS.prompts(TOKENIZER, split, seed)[index].data["question"] for index in range(40)]
    for split in ("train", "heldout")
    for seed in (0, 1)
  }
  for (split, _), texts in questions.items():
    assert {split_of(text) for text in texts} == {split}
  # reasoning-gym seeds entry i with seed + i: neighbouring seeds must not give the same questions one place later.
  assert questions["train", 0][1:] != questions["train", 1][:-1]


def test_a_task_with_too_few_questions_has_no_heldout_prompt():
  settings = ReasoningGym("letter_counting", {"min_words": 1, "max_words": 3}, num_prompts=1)
  dataset = settings.dataset(1)
  entry = next(e for e in (dataset[index] for index in range(99)) if split_of(e["question"]) == "train")
  object.__setattr__(settings, "dataset", lambda seed: [entry])
  with pytest.raises(ConfigError, match="too few different"):
    settings.prompts(TOKENIZER, "heldout", 0)[0]


@pytest.mark.parametrize(
  "arguments, field, remedy",
  [
    (("chain_sums",), "environment.task", "chain_sum"),
    (("xyzzyx",), "environment.task", "Choose among"),
    (("chain_sum", {"max_term": 2}), "environment.task_config.max_term", "max_terms"),
    (("chain_sum", {"min_terms": 5, "max_terms": 2}), "environment.task_config", "settings are"),
    (("chain_sum", {"min_terms": "two"}), "environment.task_config", "settings are"),
  ],
)
def test_unknown_names_are_refused_with_the_nearest(arguments, field, remedy):
  with pytest.raises(ConfigError) as caught:
    ReasoningGym(*arguments).prompts(TOKENIZER, "train", 0)
  assert caught.value.field == field and remedy in caught.value.remedy


@pytest.mark.parametrize(
  "arguments",
  [
    {"task_config": {"seed": 1}},
    {"task_config": {"size": 9}},
    {"num_prompts": 0},
    {"demonstration_noise": 2.0},
    {"grader_processes": 0},
    {"grader_timeout": 0.0},
    {"grader_timeout": math.nan},
  ],
)
def test_settings_that_cannot_work_are_refused_at_once(arguments):
  with pytest.raises(ConfigError) as caught:
    ReasoningGym("chain_sum", **arguments)
  assert caught.value.field == f"environment.{next(iter(arguments))}"


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
  for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
    monkeypatch.delitem(sys.modules, name)
  real_import = builtins.__import__

  def without_the_package(name, *arguments, **keywords):
    if name.partition(".")[0] == "reasoning_gym":
      raise ImportError(name)
    return real_import(name, *arguments, **keywords)

  monkeypatch.setattr(builtins, "__import__", without_the_package)
  with pytest.raises(ConfigError, match=r"'\.\[envs\]'"):
    ReasoningGym("chain_sum").prompts(TOKENIZER, "train", 0)


@pytest.mark.parametrize("task", sorted(UNSAFE_TASKS))
def test_tasks_whose_scorers_evaluate_the_answer_are_refused(task):
  with pytest.raises(ConfigError, match="evaluates what the model wrote"):
    ReasoningGym(task)


def test_no_other_scorer_evaluates_the_answer():
  """Reads the scorers of the installed version: a new one that evaluates its answer must join UNSAFE_TASKS."""
  from reasoning_gym.factory import DATASETS

  def evaluates(dataset_class) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(dataset_class.score_answer)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    risky = [
      ast.unparse(call)
      for call in calls
      if re.search(r"(eval|exec|parse_expr|sympify|Fraction)$", ast.unparse(call.func))
    ]
    return any("answer" in call and "entry[" not in call for call in risky)

  found = {task for task, (dataset_class, _) in DATASETS.items() if evaluates(dataset_class)}
  assert found <= UNSAFE_TASKS
  assert {"countdown", "puzzle24", "n_queens"} <= found  # the reading works


@pytest.mark.parametrize("task", ["chain_sum", "number_sorting", "decimal_chain_sum", "prime_factorization"])
def test_hostile_answers_are_graded_as_wrong(task, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  settings = ReasoningGym(task, grader_processes=1)
  for text in ("9**9**9", "__import__('os').system('touch pwned')", "1e999999999", "nan", "(" * 5000):
    result = run_episode(first_prompt(settings), f"<|answer|>{text}<|end|>", settings)[1]
    assert result.done and result.reward < 0.5
  assert not list(tmp_path.iterdir())


class Misbehaving:
  """A scorer that does what a scorer should not do."""

  def __init__(self, kind: str):
    self._kind = kind

  def __call__(self, seed, entry, answer):
    return graders.misbehave(self._kind)


class Scorer:
  """A data set whose scorer does what the test wants."""

  def __init__(self, **outcomes):
    self.outcomes = outcomes

  def score_answer(self, answer, entry):
    outcome = self.outcomes[answer]
    if isinstance(outcome, Exception):
      raise outcome
    return outcome


def test_a_scorer_that_the_answer_broke_grades_it_as_wrong():
  entry = {"answer": "good"}
  for outcome in (ValueError("cannot parse"), RecursionError(), math.nan, None):
    assert score(Scorer(good=1.0, bad=outcome), entry, "bad", "env") == 0.0


@pytest.mark.parametrize("outcome", [RuntimeError("gone"), math.inf, "1", None])
def test_a_scorer_that_cannot_grade_its_own_answer_is_a_failure(outcome):
  with pytest.raises(GraderFailure, match="'env'"):
    score(Scorer(good=outcome, bad=outcome), {"answer": "good"}, "bad", "env")


@pytest.mark.parametrize("kind, problem", [("hang", "killed"), ("die", "died"), ("nan", "finite")])
def test_a_scorer_that_hangs_or_dies_has_not_graded(kind, problem):
  settings = ReasoningGym("chain_sum", CHAIN_SUM)
  settings.__dict__["graders"] = GraderPool(Misbehaving(kind), processes=1, timeout=0.5)
  with pytest.raises(GraderFailure, match=f"'reasoning_gym/chain_sum'.*{problem}"):
    run_episode(first_prompt(settings), "<|answer|>1<|end|>", settings)
  assert run_episode(first_prompt(settings), "no answer<|end|>", settings)[1].reward == 0.0  # nothing to score


def test_entries_reach_the_scorer_as_they_were_made():
  """Some tasks make other entries in every process (they iterate over sets of strings), and many hold tuples."""
  settings = ReasoningGym("ransom_note", grader_processes=1)
  prompt = first_prompt(settings)
  answer = settings.entry(prompt)["answer"]
  assert run_episode(prompt, f"<|answer|>{answer}<|end|>", settings)[1].reward == 1.0


def test_settings_can_be_copied_and_compared_after_use():
  run_episode(first_prompt(), "<|answer|>1<|end|>")
  copy = dataclasses.replace(SETTINGS, num_prompts=SETTINGS.num_prompts)
  assert copy == SETTINGS and "graders" in vars(SETTINGS) and "graders" not in vars(copy)


def test_demonstrations_are_episodes_and_wrong_as_often_as_asked():
  source = SETTINGS.prompts(TOKENIZER, "train", 0)
  rewards = []
  for index in range(200):
    demonstration = SETTINGS.demonstration(source[index], TOKENIZER, np.random.default_rng(index))
    assert demonstration.token_ids.dtype == np.int32 and demonstration.action_mask.dtype == np.bool_
    action = TOKENIZER.decode(demonstration.token_ids[demonstration.action_mask])
    assert action.startswith("<|answer|>") and action.endswith("<|end|>")
    rewards.append(demonstration.reward)
    if index < 10:
      ids, result = run_episode(source[index], action)
      assert result.reward == demonstration.reward
      assert demonstration.token_ids[~demonstration.action_mask].tolist() == ids.tolist()
  assert np.mean([reward == 1.0 for reward in rewards]) == pytest.approx(0.4, abs=0.1)
  clean = ReasoningGym("chain_sum", CHAIN_SUM, demonstration_noise=0.0)
  assert clean.demonstration(source[0], TOKENIZER, np.random.default_rng(0)).reward == 1.0


@pytest.mark.parametrize("answer", ["7", "-12", "Word", "a b", "3/4"])
def test_corrupting_changes_one_character_of_its_kind(answer):
  for seed in range(20):
    wrong = corrupt(answer, np.random.default_rng(seed))
    differences = [(a, b) for a, b in zip(answer, wrong) if a != b]
    assert len(wrong) == len(answer) and len(differences) == 1
    ((before, after),) = differences
    assert before.isdigit() == after.isdigit() and before.isupper() == after.isupper()
  assert corrupt("+-", np.random.default_rng(0)) == ""
