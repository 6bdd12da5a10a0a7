"""The environment of a benchmark, in the chat of the run's own environment, and the run's configuration with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from sao_jax.config import RunConfig
from sao_jax.configuration import config_tree
from sao_jax.environments.python_tool import TOOL_INSTRUCTION, PythonTool
from sao_jax.environments.question_answer import QuestionAnswer
from sao_jax.environments.repository_record import SWEBENCH
from sao_jax.environments.repository_task import RepositoryTask
from sao_jax.errors import ConfigError
from sao_jax.evaluation.suite import Suite
from sao_jax.evaluation.suite_data import SuiteData, has_fields
from sao_jax.rewards.answer_grader import AnswerGrader
from sao_jax.rewards.llm_judge import LLMJudge

TEMPERATURE = 1.0  # of all suites, with top-p 1
BOXED = r"Reason step by step, and put your final answer within \boxed{}."  # of a chat
RUBRIC = (
  "Is the final answer the reference answer? It may be written in another way, and must have the same value; all that "
  "the reference has must be there, and nothing else. The way to it does not count. 1 if it is, 0 if it is not, or "
  "there is none."
)
TOOLS = ("python", "none")
CHAT_FIELDS = ("tokenizer_folder", "template_options", "call_format")
REPOSITORY_SECONDS = 300.0  # beside the time-outs of a task, for containers to start


def equality_judge(base_url: str, model: str, key_variable: str = "") -> LLMJudge:
  """Makes a judge of answers to mathematical questions, whose reward is 1 or 0; see `LLMJudge`."""
  return LLMJudge(base_url, model, key_variable=key_variable, rubric=RUBRIC, low=0.0, high=1.0)


def suite_config(
  config: RunConfig, suite: Suite, data: SuiteData, *, tools: str = TOOLS[0], judge: AnswerGrader | None = None
) -> RunConfig:
  """Returns the run's configuration with the environment, the turns and the sampling of a suite.

  Args:
    config: the run's, whose environment gives the tokenizer, the chat, and the settings of tools that it has, too.
    suite: the benchmark.
    data: its problems.
    tools: a name of `TOOLS`, for questions.
    judge: grades the answers in place of math-verify.

  Raises:
    ConfigError: there are no such tools.
  """
  rollout = dataclasses.replace(config.rollout, max_turns=suite.max_turns)
  if suite.kind == "repositories":
    environment = _repositories(suite, data, config.environment)
    patience = max(rollout.environment_timeout, environment.longest_answer + REPOSITORY_SECONDS)
    rollout = dataclasses.replace(rollout, environment_timeout=patience)
  elif tools in TOOLS:
    environment = _questions(suite, data, config.environment, tools, judge)
  else:
    raise ConfigError("--tools", f"there are no tools {tools!r}.", config_tree.nearest(tools, TOOLS))
  sampler = dataclasses.replace(config.sampler, top_p=1.0, top_k=0)
  return dataclasses.replace(config, environment=environment, sampler=sampler, rollout=rollout)


def _questions(
  suite: Suite, data: SuiteData, like: Any, tools: str, judge: AnswerGrader | None
) -> QuestionAnswer | PythonTool:
  """Makes the settings of questions, with the tool or without."""
  kind = PythonTool if tools == "python" else QuestionAnswer
  own = _settings_of(like, PythonTool) if kind is PythonTool else {}
  asked = own | _chat_of(like, kind) | _place(suite, data)
  asked |= {"question": data.layout.question, "answer": data.layout.answer}

  # A chat answers in a box, as the published numbers have it; the built-in tokenizer has a token for answers.
  if asked.get("tokenizer_folder"):
    prompt = f"{TOOL_INSTRUCTION} {BOXED}" if kind is PythonTool else BOXED
    return kind(**asked, system_prompt=prompt, answer_in="reply", scorer=judge or "boxed_math")
  return kind(**asked, answer_in="tags", scorer=judge or "math")


def _repositories(suite: Suite, data: SuiteData, like: Any) -> RepositoryTask:
  """Makes the settings of repositories. Their tests are not run here: that is what the official harness does."""
  own = _settings_of(like, RepositoryTask) | _chat_of(like, RepositoryTask) | _place(suite, data)
  has_snapshot = has_fields(data, "snapshot", "base_commit")
  image = "" if has_snapshot else "image" if has_fields(data, "image") else SWEBENCH
  return RepositoryTask(**own | {"image": image, "snapshot": "snapshot", "tests": "none"})


def _place(suite: Suite, data: SuiteData) -> dict[str, str]:
  """The data set of an environment, all of which is held out."""
  place = {"data": data.path, "split": data.split, "heldout_data": data.path, "heldout_split": data.split}
  return place | {"name": suite.name}


def _settings_of(environment: Any, kind: type) -> dict[str, Any]:
  """Reads what settings of a kind have of their own in the run, beyond those of questions; {} if it has none."""
  questions = {field.name for field in dataclasses.fields(QuestionAnswer)}
  names = [field.name for field in dataclasses.fields(kind) if field.name not in {*questions, "expert"}]
  own = next((each for each in _within(environment) if isinstance(each, kind)), None)
  return {} if own is None else {name: getattr(own, name) for name in names}


def _chat_of(environment: Any, kind: type) -> dict[str, Any]:
  """Reads the tokenizer and the chat from an environment, or from the first within it that has a tokenizer."""
  known = {field.name for field in dataclasses.fields(kind)}
  for each in _within(environment):
    if "tokenizer_folder" in config_tree.annotations(each):
      return {name: getattr(each, name) for name in CHAT_FIELDS if hasattr(each, name) and name in known}
  return {}


def _within(section: Any) -> Iterator[Any]:
  """Yields settings, and those in them: of wrappers and mixtures."""
  if not config_tree.is_section(section):
    return
  yield section
  for name in config_tree.annotations(section):
    for inner in config_tree.sections_at(name, getattr(section, name)).values():
      yield from _within(inner)
