"""Unit tests as a reward: the usual layouts, what cheats earn, and faults of the data."""

from __future__ import annotations

import asyncio
import json
import pickle
import textwrap

import pytest
from toys import sandbox_cheats, sandboxes

from sao_jax.environments.question_answer import QuestionAnswer
from sao_jax.episode import GraderFailure
from sao_jax.errors import ConfigError
from sao_jax.rewards.answer_grader import AnswerGrader
from sao_jax.sandbox.program_cases import read_cases
from sao_jax.sandbox.unit_tests import UnitTests, code_of

ADD = "def add(a, b):\n  return a + b\n"
ECHO = "n = int(input())\nfor _ in range(n):\n  print(sum(map(int, input().split())), end='  \\n')\n"
ASSERTS = ["assert add(2, 3) == 5", "assert add((1,), (2,)) == (1, 2)", "assert add('a', b='b') == 'ab'"]
PROGRAM = {"inputs": ["1\n2 3\n", ["2", "1 1", "2 2"]], "outputs": ["5\n", "2\n4"]}
CALLS = {"fn_name": "add", "inputs": [[2, 3], [[1], [2]]], "outputs": [5, [[1, 2]]]}
LIVE = [{"input": "1\n2 3", "output": "5", "testtype": "stdin"}]
METHOD = "class Solution:\n  def add(self, a, b):\n    return (*a, *b) if isinstance(a, list) else a + b\n"
SETUP = {"test_list": ["assert math.isclose(add(0.1, 0.2), 0.3)"], "test_imports": ["import math"]}

HIDDEN = ["assert answer() == 42, 'hidden-7f3a9c'", "assert answer() + 1 == 43"]
CHEATS = {
  "always equal": """
class Equal(int):
  __eq__ = __ge__ = __le__ = lambda self, other: True
  __add__ = __radd__ = lambda self, other: self
  __hash__ = int.__hash__
answer = lambda: Equal(41)
""",
  "an object that is equal to all": """
class E:
  __eq__ = lambda self, other: True
  __repr__ = lambda self: '42'
answer = lambda: E()
""",
  "code as a value": "class E(list):\n  def __repr__(self): return '__import__(\"os\")._exit(0)'\nanswer = lambda: E()",
  "patched judge": """
import ast, builtins
builtins.AssertionError = None
ast.literal_eval = lambda text: 42
answer = lambda: 41
""",
  "a count on the output": "import os\nos.write(1, b'\\n3 \\n')\nprint('3 ')\nanswer = lambda: 41",
  "the judge's output": "import os\nos.write(os.open('/proc/%d/fd/1' % os.getppid(), os.O_WRONLY), b'\\n3 \\n')",
  "a file in place of a module": "open('/workspace/ast.py', 'w').write('import os; os._exit(0)')\nanswer = lambda: 41",
  "no code": "",
  "no Python": "answer = (",
}
CHEATS |= {
  name: f"{sandbox_cheats.HEAD}def answer():\n{textwrap.indent(textwrap.dedent(body).strip(), '  ')}\n"
  for name, body in sandbox_cheats.CHEATS.items()
}


@pytest.fixture(scope="module")
def grade():
  """Grades answers with one event loop, whose sandboxes are used again and again."""
  if sandboxes.missing():
    pytest.skip(sandboxes.missing())
  with asyncio.Runner() as runner:
    graders = {}

    def run(said, gold, **settings):
      key = tuple(settings.items())
      graders.setdefault(key, UnitTests(sandboxes=1, warm=1, limits=sandboxes.SMALL, **settings))
      return runner.run(graders[key].grade("env", "question", said, gold))

    yield run
    for grader in graders.values():
      runner.run(grader.close())


@pytest.mark.parametrize(
  "code, gold, count",
  [(ADD, ASSERTS, 3), (ECHO, PROGRAM, 2), (ADD, CALLS, 2), (METHOD, CALLS, 2), (ECHO, LIVE, 1), (ADD, SETUP, 1)],
)
def test_a_right_program_passes_in_every_layout(grade, code, gold, count):
  for form in (gold, json.dumps(gold)):
    reward, facts = grade(f"<think>x</think>Thus:\n```python\n{code}```\nDone.", form)
    assert (reward, facts["tests"], facts["tests_passed"], facts["tests_left_out"]) == (1.0, count, count, 0)


def test_a_program_that_is_right_in_part_earns_the_share_or_nothing(grade):
  half = "def add(a, b):\n  return a + b if isinstance(a, int) else None\n"
  assert grade(half, ASSERTS)[0] == 0.0
  reward, facts = grade(half, ASSERTS, reward="fraction")
  assert reward == pytest.approx(1 / 3) and facts["tests_passed"] == 1
  assert grade(half, CALLS, reward="fraction")[0] == 0.5
  assert grade("print(5)", PROGRAM, reward="fraction")[0] == 0.5
  reward, facts = grade(half, ASSERTS, reward="fraction", max_cases=1)
  assert reward == 1.0 and facts["tests_left_out"] == 2


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_earn_nothing_of_any_case(grade, name):
  reward, facts = grade(CHEATS[name], HIDDEN, reward="fraction")
  assert reward == 0.0 and facts["tests_passed"] == 0


def test_a_program_that_hangs_fails_its_case_and_one_that_eats_memory_earns_nothing(grade):
  slow = "import time\ndef add(a, b):\n  time.sleep(60 if a == 2 else 0)\n  return a + b\n"
  assert grade(slow, ASSERTS, reward="fraction", case_timeout=0.5)[1]["tests_passed"] == 2
  assert grade(slow, ASSERTS[:1] * 50, reward="fraction", case_timeout=0.5, timeout=0.6)[0] == 0.0
  assert grade("def add(a, b):\n  return bytearray(10**10)\n", ASSERTS)[0] == 0.0


def test_what_a_program_returns_into_its_own_next_call_is_its_own_fault(grade):
  assert grade("def add(a, b):\n  return float('inf')\n", ["assert add(add(1, 2), 3) == 6"])[0] == 0.0


@pytest.mark.parametrize(
  "gold, problem",
  [
    (["assert add(object(), 1) is None"], "no plain values"),
    ({"test_list": ["assert add(1, 2) == 3"], "test_imports": ["import no_such_module"]}, "ModuleNotFoundError"),
    (["from math import *\nassert add(1, 2) == 3"], "no Python program"),
  ],
)
def test_a_test_that_cannot_be_run_is_a_failure_and_never_zero(grade, gold, problem):
  with pytest.raises(GraderFailure, match=problem):
    grade(ADD, gold)


@pytest.mark.parametrize(
  "gold",
  [
    *(None, 7, "no JSON", [], {}, [""], ["assert ("], ["assert 1 == 1"], [7], {"inputs": ["1"], "outputs": []}),
    *({"inputs": [1], "outputs": ["1"]}, {"inputs": [[1]], "outputs": [1], "fn_name": "a b"}),
    *([{"input": "1", "output": "1", "testtype": "functional"}], {"inputs": [], "outputs": []}),
  ],
)
def test_what_holds_no_tests_is_refused(gold):
  with pytest.raises(ConfigError, match="^row 3: "):
    read_cases(gold, "row 3")


def test_names_that_nothing_defines_are_the_programs():
  cases = ["assert [add(x, y) for x in range(3) for y in (lambda z: [z])(x)] == sorted({1})", "import math as m; m.pi"]
  assert read_cases(cases).names == ("add",)


def test_the_last_block_is_the_code():
  assert code_of("```python\na\n```\n```text\nb\n```\n```\nc\n```\n") == "c\n" and code_of("x = 1") == "x = 1"


@pytest.mark.parametrize(
  "field, value",
  [
    ("reward", "some"),
    ("case_timeout", 0.0),
    ("timeout", float("inf")),
    ("max_cases", 0),
    ("sandboxes", 0),
    ("warm", 9),
  ],
)
def test_settings_that_cannot_work_are_refused(field, value):
  with pytest.raises(ConfigError, match=field):
    UnitTests(**{field: value})


def test_questions_are_graded_by_tests_where_a_scorer_is_named(tmp_path):
  if sandboxes.missing():
    pytest.skip(sandboxes.missing())
  path = tmp_path / "problems.jsonl"
  path.write_text(json.dumps({"text": "Add.", "test_list": ASSERTS}) + '\n{"text": "Bad.", "test_list": "x"}\n')
  tests = UnitTests(sandboxes=1, warm=0, limits=sandboxes.SMALL)
  settings = QuestionAnswer(
    str(path), question="text", answer="test_list", answer_in="reply", heldout_data=str(path), scorer=tests
  )
  assert isinstance(tests, AnswerGrader) and pickle.loads(pickle.dumps(settings)) == settings
  tokenizer = settings.tokenizer()
  prompts = settings.prompts(tokenizer, "train", 0)

  async def episode(prompt):
    environment = settings.make(tokenizer)
    await environment.reset(prompt)
    said = [*tokenizer.encode(ADD), tokenizer.end_id]
    result = await environment.step(said)
    await tests.close()
    return result

  result = asyncio.run(episode(prompts[0]))
  assert result.reward == 1.0 and result.info["tests_passed"] == 3
  with pytest.raises(ValueError, match="'x'.*UnitTests.*cannot read"):
    asyncio.run(episode(prompts[1]))
