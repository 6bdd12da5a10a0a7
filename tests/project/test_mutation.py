"""The tool that puts faults into the code: the faults that it finds, the tests that it lets them meet, its results."""

from __future__ import annotations

import ast
import json

import pytest
from tools import mutants, mutate

SOURCE = '''
"""A docstring with 1 and not 2."""

LIMIT: int = 3


def f(x: int = 0, *, scale: float = 0.5) -> bool:
  """Says 1 == 2."""
  if not x:
    return False
  log.info("größer als %d", x - 1)
  y = g(x, "ä") + min(x, key=abs)
  y *= 2
  if x < LIMIT and y in (4, x):
    raise ValueError(f"{x + 1} is not {y - 1}")
  return -y if y is None else True
'''

FAULTS = {
  ("constant", "3", "4"),
  ("constant", "0", "1"),
  ("constant", "0.5", "1.5"),
  ("negation", "not x", "(x)"),
  ("guard", "if not x:\n    return False", "pass"),
  ("constant", "False", "True"),
  ("swapped", 'g(x, "ä")', "(g('ä', x))"),
  ("arithmetic", 'g(x, "ä") + min(x, key=abs)', "(g(x, 'ä') - min(x, key=abs))"),
  ("function", "min", "max"),
  ("left out", "min(x, key=abs)", "(min(x))"),
  ("statement", "y *= 2", "pass"),
  ("constant", "2", "3"),
  ("boolean", "x < LIMIT and y in (4, x)", "(x < LIMIT or y in (4, x))"),
  ("comparison", "x < LIMIT", "(x <= LIMIT)"),
  ("comparison", "y in (4, x)", "(y not in (4, x))"),
  ("constant", "4", "5"),
  ("branches", "-y if y is None else True", "(True if y is None else -y)"),
  ("negation", "-y", "(y)"),
  ("comparison", "y is None", "(y is not None)"),
  ("constant", "True", "False"),
}


def test_every_kind_of_fault_is_found_and_nothing_that_only_says_something():
  found = mutants.find("room/file.py", SOURCE)
  assert {(mutant.kind, mutant.old, mutant.new) for mutant in found} == FAULTS
  assert len({mutant.name for mutant in found}) == len(found)


def test_a_fault_is_the_only_change_and_belongs_to_one_version_of_the_file():
  for mutant in mutants.find("room/file.py", SOURCE):
    faulty = mutant.apply(SOURCE)
    ast.parse(faulty)
    assert len(faulty) - len(SOURCE) == len(mutant.new) - len(mutant.old)
    assert faulty.splitlines()[: mutant.line - 1] == SOURCE.splitlines()[: mutant.line - 1]
    with pytest.raises(ValueError, match="this version of the file"):
      mutant.apply("# more\n" + SOURCE)


def test_a_sample_takes_the_rooms_in_turn_and_a_larger_one_begins_alike():
  found = [mutant for room in ("a", "b") for mutant in mutants.find(f"{room}/file.py", SOURCE)]
  few, many = mutants.sample(found, 7, seed=3), mutants.sample(found, 1000, seed=3)
  assert [mutant.room for mutant in few] == ["a", "b", "a", "b", "a", "b", "a"]
  assert many[:7] == few and sorted(many, key=found.index) == found
  assert mutants.sample(found, 7, seed=4) != few


@pytest.fixture
def folder(tmp_path):
  """A package of two rooms, the second of which has nothing of its own but uses the first."""
  files = {
    "tests/upper/test_of_file.py": "from toys import helper",
    "tests/upper/test_of_room.py": "import sao_jax.upper.other",
    "tests/lower/test_of_user.py": "from sao_jax.upper import other",
    "tests/lower/test_of_nobody.py": "import json",
    "tests/toys/helper.py": "from sao_jax.upper.file import f",
    "sao_jax/upper/file.py": SOURCE,
  }
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text, encoding="utf-8")
  return tmp_path


@pytest.fixture
def fault(folder):
  return mutate.all_mutants(folder / "sao_jax", ["upper"])[4]


def test_a_fault_meets_the_tests_of_its_module_then_of_its_room_then_of_its_users(folder, fault):
  assert list(mutate.stages(fault, folder / "tests")) == [
    ["tests/upper/test_of_file.py"],
    ["tests/upper/test_of_room.py"],
    ["tests/lower/test_of_user.py"],
  ]


@pytest.mark.parametrize("noticed_by", [None, "tests/upper/test_of_room.py"])
def test_a_fault_stands_in_the_copy_only_while_its_tests_run(folder, fault, monkeypatch, noticed_by):
  path, ran = folder / "sao_jax/upper/file.py", []

  def run_tests(folder, files, seconds):
    faulty = path.read_text(encoding="utf-8") == fault.apply(SOURCE)
    ran.append((files, faulty))
    outcome = mutate.CAUGHT if faulty and files == [noticed_by] else mutate.SURVIVED
    return outcome, f"FAILED {files[0]}::test - AssertionError", 2.0

  monkeypatch.setattr(mutate, "run_tests", run_tests)
  result = mutate.Judge(folder, 60.0)(fault)
  assert result["outcome"] == (mutate.CAUGHT if noticed_by else mutate.SURVIVED)
  assert result["mutant"] == fault.name and result["seconds"] == 2.0 * (2 if noticed_by else 3)
  assert path.read_text(encoding="utf-8") == SOURCE
  if noticed_by:  # looked at once more without the fault
    assert ran[-1] == ([noticed_by], False) and len(ran) == 3


def test_a_test_that_fails_without_the_fault_too_says_nothing(folder, fault, monkeypatch):
  broken = lambda folder, files, seconds: (mutate.CAUGHT, f"FAILED {files[0]}::test", 1.0)
  monkeypatch.setattr(mutate, "run_tests", broken)
  assert mutate.Judge(folder, 60.0)(fault)["outcome"] == mutate.UNSURE
  assert (folder / "sao_jax/upper/file.py").read_text(encoding="utf-8") == SOURCE


def test_results_are_counted_by_room_and_a_line_cut_short_is_judged_again(tmp_path):
  outcomes = [("a", mutate.CAUGHT), ("a", mutate.CAUGHT), ("b", mutate.TIMED_OUT), ("b", mutate.SURVIVED)]
  lines = [{"mutant": str(i), "room": room, "outcome": outcome} for i, (room, outcome) in enumerate(outcomes)]
  path = tmp_path / "mutation.jsonl"
  path.write_text("\n".join(map(json.dumps, lines)) + '\n{"mutant": "4", "ro', encoding="utf-8")
  results = mutate.read_results(path)
  assert results == lines and mutate.read_results(tmp_path / "none") == []
  rows = [[cell.strip() for cell in row.strip("| ").split("|")] for row in mutate.table(results).splitlines()]
  assert rows[0] == ["room", "caught", "survived", "timed out", "unsure", "all"]
  assert rows[1:] == [["a", "2", "0", "0", "0", "2"], ["b", "0", "1", "1", "0", "2"], ["all", "2", "1", "1", "0", "4"]]
