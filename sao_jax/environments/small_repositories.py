"""Small repositories with small bugs, drawn at random: a `RepositoryTask` that a tiny model can learn.

    bo(x): x-7                                problem
    bash cat m.py                             call; two functions are shown, the second one is: def bo(x): return x*7
    bash sed -i '/bo/s/*/-/' m.py             call, which corrects it
    done                                      a turn without calls, after which hidden tests decide

A repository is one file with two functions of one line, and one of them computes with a wrong operator. The name of a
record tells all of it, as in "ka+3 bo*7 bo-": the functions as they are, and the operator that one should have.

The expert makes mistakes on purpose: it guesses without looking, names the other function or another operator, or
writes what `sed` does not take, and then again.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

import numpy as np

from sao_jax.chat.byte_chat import write_byte_call
from sao_jax.data.prompts import check_split, split_of
from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.base import Demonstration
from sao_jax.environments.hidden_tests import Runner
from sao_jax.environments.repository_record import RepositoryRecord
from sao_jax.environments.repository_task import RepositoryTask
from sao_jax.environments.repository_tools import BASH
from sao_jax.environments.scripted_chat import scripted_chat
from sao_jax.episode import BadPrompt, Prompt, PromptKey
from sao_jax.errors import ConfigError

OPERATORS = "+-*"
NAMES = tuple(map("".join, itertools.product("bgkmpsvz", "aeiou")))  # none of them is part of another word of the file
NUMBERS = range(2, 10)
FILE, TESTS = "m.py", "test_m.py"
POINTS = (2, 5, 11)  # where hidden tests look; x+b, x-b and x*b differ at one of them at least
RECORD = re.compile(r"(\w\w)([-+*])(\d) (\w\w)([-+*])(\d) (\w\w)([-+*])")
MISTAKES = ("function", "operator", "malformed")  # of the expert's correction, equally likely
NUM_PROMPTS = {"train": 100_000, "heldout": 2000}


@dataclasses.dataclass(frozen=True)
class SmallRepositories(RepositoryTask):
  """Settings: records are drawn, and stand in no data set; the rest is a `RepositoryTask`'s."""

  name: str = "small_repositories"
  system_prompt: str = ""
  tools: tuple[str, ...] = ("bash",)
  tests: Runner = "functions"
  call_timeout: float = 5.0  # all together less than rollout.environment_timeout
  test_timeout: float = 5.0
  max_output_tokens: int = 96
  sandboxes: int = 8
  demonstration_noise: float = 0.4  # chance that one step of a demonstration goes wrong

  def __post_init__(self):
    super().__post_init__()
    if not 0.0 <= self.demonstration_noise <= 1.0:
      problem = f"{self.demonstration_noise!r} cannot work."
      raise ConfigError("environment.demonstration_noise", problem, "Use a chance between 0 and 1.")

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    self.check_sandbox()
    return DrawnRepositories(self.name, check_split(split), seed)

  def record(self, prompt: Prompt) -> RepositoryRecord:
    return make_record(prompt.data["instance_id"])

  def demonstration(self, prompt: Prompt, tokenizer: Tokenizer, rng: np.random.Generator) -> Demonstration:
    """Plays the expert, whose every step goes wrong with probability `demonstration_noise`; nothing is run."""
    script, solved = demonstrate(prompt.data["instance_id"], rng, self.demonstration_noise)
    user = {"role": "user", "content": prompt.data["problem_statement"]}
    return scripted_chat(self.renderer, [user, *script], float(solved), [BASH])


class DrawnRepositories(Sequence[Prompt]):
  """Repositories by index: the first of the split among the draws (seed, index, 0), (seed, index, 1), ..."""

  def __init__(self, name: str, split: str, seed: int):
    self._name, self._split, self._seed = name, split, seed

  def __len__(self) -> int:
    return NUM_PROMPTS[self._split]

  def __getitem__(self, index: int) -> Prompt:
    if not 0 <= index < len(self):
      raise IndexError(index)
    drawn = (draw_record(np.random.default_rng((self._seed, int(index), draw))) for draw in itertools.count())
    instance_id = next(each for each in drawn if split_of(each) == self._split)
    problem = make_record(instance_id).problem_statement
    shown = {"instance_id": instance_id, "problem_statement": problem}
    return Prompt(PromptKey(self._name, int(index), 0), shown)


def draw_record(rng: np.random.Generator) -> str:
  """Draws the name of a record."""
  names = rng.choice(NAMES, size=2, replace=False)
  operators = [str(rng.choice(list(OPERATORS))) for _ in names]
  functions = [f"{name}{operator}{rng.choice(NUMBERS)}" for name, operator in zip(names, operators)]
  wrong = int(rng.integers(2))
  right = rng.choice([operator for operator in OPERATORS if operator != operators[wrong]])
  return f"{functions[0]} {functions[1]} {names[wrong]}{right}"


def make_record(instance_id: str) -> RepositoryRecord:
  """Makes a record of its name.

  >>> print(make_record("ka+3 bo*7 bo-").snapshot["m.py"], end="")
  def ka(x): return x+3
  def bo(x): return x*7

  Raises:
    BadPrompt: it is no such name.
  """
  match = RECORD.fullmatch(instance_id)
  if match is None:
    problem = f"{instance_id!r:.80} is no name of a small repository"
    raise BadPrompt("environment", problem, "Start a run of its own", reason="repository_damaged")
  first, second, (target, right) = match.group(1, 2, 3), match.group(4, 5, 6), match.group(7, 8)
  functions = {name: (operator, number) for name, operator, number in (first, second)}
  lines = [f"def {name}(x): return x{operator}{number}\n" for name, (operator, number) in functions.items()]

  # What the two functions should be, and tests of it.
  due = functions | {target: (right, functions[target][1])}
  bodies = {name: [_value(x, *due[name]) for x in POINTS] for name in due}
  tests = [f"import {FILE[:-3]} as m"]
  for name, values in bodies.items():
    tests += ["", "", f"def test_{name}():"]
    tests += [f"  assert m.{name}({x}) == {value}" for x, value in zip(POINTS, values)]
  patch = f"--- /dev/null\n+++ b/{TESTS}\n@@ -0,0 +1,{len(tests)} @@\n" + "".join(f"+{line}\n" for line in tests)
  ids = {name: f"{TESTS}::test_{name}" for name in functions}
  return RepositoryRecord(
    instance_id=instance_id,
    problem_statement=f"{target}(x): x{right}{functions[target][1]}",
    base_commit="",
    test_patch=patch,
    fail_to_pass=(ids[target],),
    pass_to_pass=tuple(test for name, test in ids.items() if name != target),
    snapshot={FILE: "".join(lines)},
  )


def demonstrate(instance_id: str, rng: np.random.Generator, noise: float) -> tuple[list[dict[str, str]], bool]:
  """Writes what the expert says, and what the shell answers it.

  Args:
    instance_id: name of the record.
    rng: decides which steps go wrong and how.
    noise: probability that a step goes wrong.

  Returns:
    The conversation behind the problem, and True if the repository is right at its end.
  """
  first, second, target, right = RECORD.fullmatch(instance_id).group(1, 4, 7, 8)
  text = make_record(instance_id).snapshot[FILE]
  script: list[dict[str, str]] = []

  def run(command: str, output: str) -> None:
    script.append({"role": "assistant", "content": write_byte_call("bash", {"command": command}, [BASH])})
    script.append({"role": "tool", "content": output})

  # Without a look the operator that stands there is a guess.
  old = re.search(rf"def {target}\(x\): return x(.)", text).group(1)
  if rng.random() < noise:
    old = str(rng.choice([operator for operator in OPERATORS if operator != right]))
  else:
    run(f"cat {FILE}", text.rstrip("\n"))

  # A correction that sed refuses is written again, with care; of other mistakes nothing is seen.
  place, new = target, right
  mistake = MISTAKES[rng.integers(len(MISTAKES))] if rng.random() < noise else ""
  if mistake == "function":
    place = second if target == first else first
  if mistake == "operator":
    new = next(operator for operator in OPERATORS if operator not in (old, right))
  expression = f"/{place}/s/{old}/{new}/"
  if mistake == "malformed":
    said = f"sed: -e expression #1, char {len(expression) - 1}: unterminated `s' command\n[exit status 1]"
    run(f"sed -i '{expression[:-1]}' {FILE}", said)
  run(f"sed -i '{expression}' {FILE}", "")
  script.append({"role": "assistant", "content": "done"})
  return script, f"def {target}(x): return x{old}" in text and (place, new) == (target, right)


def _value(x: int, operator: str, number: str) -> int:
  """Computes one function at a point."""
  return {"+": x + int(number), "-": x - int(number), "*": x * int(number)}[operator]
