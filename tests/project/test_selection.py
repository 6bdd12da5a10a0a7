"""What `launch/test.sh --fast` leaves out: tests that exist, and never the whole of a room's essentials."""

from __future__ import annotations

import ast

import pytest
from toys import selection
from toys.paths import REPOSITORY, TESTS

# What nobody should commit without: golden numbers, worked examples, the train step against plain loops, the layers.
ESSENTIAL = (
  *("algorithm/test_advantage.py", "algorithm/test_policy_loss.py", "algorithm/test_train_step.py"),
  *("models/test_transformer.py", "models/test_layers.py", "sampler/test_engine.py", "sampler/test_parity.py"),
  *("rollout/test_buffer.py", "rollout/test_rollout_loop.py", "checkpoints/test_checkpointer.py"),
  *("environments/test_calculator.py", "rewards/test_scalar.py", "chat/test_template.py", "learner/test_packing.py"),
  *("configuration/test_relations.py", "training/test_loop.py", "launch/test_flags.py", "report/test_metrics.py"),
  *("huggingface/test_convert.py", "parallel/test_mesh.py", "evaluation/test_heldout.py", "data/test_prompts.py"),
  *("project/test_import_layers.py", "project/test_documented_values.py"),
)


def functions(file: str) -> list[str]:
  tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
  return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


@pytest.mark.parametrize("entry", selection.read())
def test_what_is_listed_exists(entry):
  file, _, function = entry.partition("::")
  assert (REPOSITORY / file).is_file()
  assert not function or function in functions(file)


def test_nothing_is_listed_twice():
  slow = selection.read()
  assert len(set(slow)) == len(slow)
  assert not [entry for entry in slow if "::" in entry and entry.partition("::")[0] in slow]


@pytest.mark.parametrize("name", ESSENTIAL)
def test_essential_tests_stay_in_the_fast_selection(name):
  file, slow = f"tests/{name}", selection.read()
  fast = [function for function in functions(file) if not selection.matches(slow, f"{file}::{function}")]
  assert len(fast) >= len(functions(file)) / 3


def test_every_room_has_fast_tests():
  slow = selection.read()
  for room in sorted(path for path in TESTS.iterdir() if path.is_dir() and any(path.glob("test_*.py"))):
    files = [f"tests/{room.name}/{path.name}" for path in room.glob("test_*.py")]
    assert any(not selection.matches(slow, f"{file}::{name}") for file in files for name in functions(file)), room.name


def test_files_and_functions_match_with_all_parameters_and_come_first():
  slow = ["tests/a/test_b.py::test_c", "tests/a/test_d.py"]
  for nodeid in ("tests/a/test_b.py::test_c[1-x::y]", "tests/a/test_b.py::test_c", "tests/a/test_d.py::test_e[0]"):
    assert selection.matches(slow, nodeid)
  for nodeid in ("tests/a/test_b.py::test_cc", "tests/a/test_bd.py::test_c"):
    assert not selection.matches(slow, nodeid)
  nodeids = ["tests/a/test_a.py::test_a", "tests/a/test_d.py::test_e", "tests/a/test_b.py::test_z"]
  assert sorted(nodeids, key=lambda nodeid: selection.rank(slow, nodeid)) == nodeids[::-1]
