"""The environment of a benchmark, in the chat of the run's own environment, and the run's configuration with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from sao_jax.config import RunConfig
from sao_jax.configuration import config_tree
from sao_jax.environments.base import EnvironmentSpec
from sao_jax.environments.question_answer import QuestionAnswer
from sao_jax.errors import ConfigError
from sao_jax.evaluation.suite import Suite
from sao_jax.evaluation.suite_data import SuiteData
from sao_jax.rewards.answer_grader import AnswerGrader
from sao_jax.rewards.llm_judge import LLMJudge

TEMPERATURE = 1.0  # of all suites, with top-p 1
BOXED = r"Reason step by step, and put your final answer within \boxed{}."  # of a chat
RUBRIC = (
  "Is the final answer the reference answer? It may be written in another way, and must have the same value; all that "
  "the reference has must be there, and nothing else. The way to it does not count. 1 if it is, 0 if it is not, or "
  "there is none."
)
TOOLS = ("none",)
CHAT_FIELDS = ("tokenizer_folder", "template_options", "call_format")


def equality_judge(base_url: str, model: str, key_variable: str = "") -> LLMJudge:
  """Makes a judge of answers to mathematical questions, whose reward is 1 or 0; see `LLMJudge`."""
  return LLMJudge(base_url, model, key_variable=key_variable, rubric=RUBRIC, low=0.0, high=1.0)


def suite_config(
  config: RunConfig, suite: Suite, data: SuiteData, *, tools: str = "none", judge: AnswerGrader | None = None
) -> RunConfig:
  """Returns the run's configuration with the environment, the turns and the sampling of a suite.

  Args:
    config: the run's, whose environment gives the tokenizer and the chat.
    suite: the benchmark.
    data: its problems.
    tools: a name of `TOOLS`.
    judge: grades the answers in place of math-verify.

  Raises:
    ConfigError: there are no such tools.
  """
  environment = make_environment(suite, data, chat_of(config.environment), tools, judge)
  return dataclasses.replace(
    config,
    environment=environment,
    sampler=dataclasses.replace(config.sampler, top_p=1.0, top_k=0),
    rollout=dataclasses.replace(config.rollout, max_turns=suite.max_turns),
  )


def make_environment(
  suite: Suite, data: SuiteData, chat: dict[str, Any], tools: str, judge: AnswerGrader | None
) -> EnvironmentSpec:
  """Makes the settings of a suite's environment, all of whose problems are held out."""
  if tools not in TOOLS:
    raise ConfigError("--tools", f"there are no tools {tools!r}.", config_tree.nearest(tools, TOOLS))
  place = {"data": data.path, "split": data.split, "heldout_data": data.path, "heldout_split": data.split}
  place |= {"name": suite.name, "question": data.layout.question, "answer": data.layout.answer}

  # A chat answers in a box, as the published numbers have it; the built-in tokenizer has a token for answers.
  chat = {name: value for name, value in chat.items() if name != "call_format"}
  if chat.get("tokenizer_folder"):
    asked = {"system_prompt": BOXED, "answer_in": "reply", "scorer": judge or "boxed_math"}
  else:
    asked = {"answer_in": "tags", "scorer": judge or "math"}
  return QuestionAnswer(**place, **chat, **asked)


def chat_of(environment: Any) -> dict[str, Any]:
  """Reads the tokenizer and the chat from an environment, or from the first within it that has a tokenizer."""
  for each in _within(environment):
    if "tokenizer_folder" in config_tree.annotations(each):
      return {name: getattr(each, name) for name in CHAT_FIELDS if hasattr(each, name)}
  return {}


def _within(section: Any) -> Iterator[Any]:
  """Yields settings, and those in them: of wrappers and mixtures."""
  if not config_tree.is_section(section):
    return
  yield section
  for name in config_tree.annotations(section):
    for inner in config_tree.sections_at(name, getattr(section, name)).values():
      yield from _within(inner)
