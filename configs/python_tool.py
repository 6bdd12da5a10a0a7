"""A Python tool on a laptop CPU: a tiny model learns to compute in a sandbox what is too large for its head.

    a=47*86;a-395             question
    python a=47*86            call; its variable lives on
    python a-395              call, whose output is 3647
    3647                      answer

The model is the quickstart's. It imitates an expert that makes mistakes on purpose, and SAO makes it better than that.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from configs import calculator
from sao_jax.chat.byte_chat import ANSWER, write_byte_call
from sao_jax.config import RunConfig
from sao_jax.data.prompts import check_split, split_of
from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.base import Demonstration
from sao_jax.environments.calculator import change_digit
from sao_jax.environments.python_tool import NAME, TOOLS, PythonTool
from sao_jax.environments.scripted_chat import scripted_chat
from sao_jax.episode import Prompt, PromptKey

NUM_PROMPTS = {"train": 100_000, "heldout": 2000}
MISTAKES = ("digit", "early answer", "malformed")  # of the expert, equally likely
SILENT, NO_SYNTAX = "(no output)", "SyntaxError: invalid syntax"  # what the tool says


@dataclasses.dataclass(frozen=True)
class LargeNumbers(PythonTool):
  """Settings: questions are drawn, and stand in no data set; the rest is a `PythonTool`'s."""

  data: str = "drawn"
  name: str = "large_numbers"
  scorer: str = "integer"
  max_output_tokens: int = 64
  demonstration_noise: float = 0.3  # chance that one step of a demonstration goes wrong

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    self.check_sandbox()
    return DrawnQuestions(self.name, check_split(split), seed)

  def demonstration(self, prompt: Prompt, tokenizer: Tokenizer, rng: np.random.Generator) -> Demonstration:
    """Plays an expert that computes in two calls, and whose every step may go wrong."""
    question, gold = prompt.data["question"], prompt.data["answer"]
    script = demonstrate(question, int(gold), rng, self.demonstration_noise)
    reward = self.grading.score_now(self.read_answer(script[-1]["content"]), prompt)
    return scripted_chat(self.renderer, [*self.messages(question), *script], reward, TOOLS)


class DrawnQuestions(Sequence[Prompt]):
  """Questions by index: the first of the split among the draws (seed, index, 0), (seed, index, 1), ..."""

  def __init__(self, name: str, split: str, seed: int):
    self._name, self._split, self._seed = name, split, seed

  def __len__(self) -> int:
    return NUM_PROMPTS[self._split]

  def __getitem__(self, index: int) -> Prompt:
    if not 0 <= index < len(self):
      raise IndexError(index)
    # The answer comes with the question, as from a data set.
    draw, question, answer = 0, "", 0
    while not question or split_of(question) != self._split:
      rng = np.random.default_rng((self._seed, int(index), draw))
      first, second = (int(factor) for factor in rng.integers(11, 100, size=2))
      less = int(rng.integers(100, 1000))
      question, answer, draw = f"a={first}*{second};a-{less}", first * second - less, draw + 1
    return Prompt(PromptKey(self._name, int(index), 0), {"question": question, "answer": answer})


def demonstrate(question: str, gold: int, rng: np.random.Generator, noise: float) -> list[dict[str, str]]:
  """Writes what the expert says, and what the tool answers it.

  Args:
    question: of the form a=47*86;a-395.
    gold: its answer.
    rng: decides which steps go wrong and how.
    noise: probability that a step goes wrong.
  """
  script: list[dict[str, str]] = []
  assignment, expression = question.split(";")
  wanted, value, mistakes = [assignment, expression], gold, list(MISTAKES)
  while wanted:
    code = wanted[0]
    mistake = mistakes[rng.integers(len(mistakes))] if rng.random() < noise else ""
    if mistake == "early answer":
      value = int(rng.integers(10**4))
      break

    # A wrong digit is computed with, and never noticed; code that is none is written again.
    if mistake == "digit":
      code = wrong_digit(code, rng)
    if mistake == "malformed":
      code = f"{code}*"
      mistakes.remove(mistake)  # once is enough
    else:
      wanted.pop(0)
      assignment, expression = (code, expression) if wanted else (assignment, code)

    # The tool says what the code as written gives.
    value = compute(assignment, expression)
    output = NO_SYNTAX if mistake == "malformed" else SILENT if wanted else str(value)
    script.append({"role": "assistant", "content": write_byte_call(NAME, {"code": code}, TOOLS)})
    script.append({"role": "tool", "content": output})

  # The answer is copied, with a mistake now and then.
  said = change_digit(str(value), rng) if rng.random() < noise / 2 else str(value)
  return [*script, {"role": "assistant", "content": f"{ANSWER}{said}"}]


def wrong_digit(code: str, rng: np.random.Generator) -> str:
  """Replaces one digit by another one; no number begins with 0 then, which would be no Python."""
  changed = code
  while changed == code or re.search(r"\b0", changed):
    changed = change_digit(code, rng)
  return changed


def compute(assignment: str, expression: str) -> int:
  """Computes a question of two parts, as the tool does."""
  first, second = assignment.removeprefix("a=").split("*")
  return int(first) * int(second) - int(expression.removeprefix("a-"))


def get_config() -> RunConfig:
  """The quickstart's numbers, with longer episodes."""
  base = calculator.get_config()
  return dataclasses.replace(
    base,
    name="python_tool",
    environment=LargeNumbers(),
    sampler=dataclasses.replace(base.sampler, context_length=144, prefill_buckets=(48,), window_buckets=(144,)),
    rollout=dataclasses.replace(
      base.rollout, max_turns=6, max_tokens=96, max_tokens_per_turn=24, row_lengths=(144,), row_counts=(40, 64)
    ),
    sft=dataclasses.replace(base.sft, batch_size=32, steps=500),
    value_pretraining=dataclasses.replace(base.value_pretraining, demonstration_steps=30, min_steps=60, max_steps=60),
    evaluation=dataclasses.replace(base.evaluation, every=25, prompts=200),
    training=dataclasses.replace(base.training, steps=75, checkpoint_every=25),
  )
