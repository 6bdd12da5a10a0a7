"""Nothing that a user loads is ever unpickled or evaluated: configurations, checkpoints, records, data sets."""

from __future__ import annotations

import ast
import io
import json
import pathlib
import pickle

import numpy as np
import pytest
from absl import flags
from toys import training_toy
from toys.paths import REPOSITORY

from launch import _flags
from sao_jax.checkpoints import host_state
from sao_jax.checkpoints.host_state import decode
from sao_jax.errors import ConfigError
from sao_jax.training.consumed import Record

SOURCES = sorted(path for room in ("sao_jax", "launch", "configs") for path in (REPOSITORY / room).rglob("*.py"))
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml"}
# Graders go to their worker processes pickled by the parent; what comes back, after model text was graded, is JSON.
BETWEEN_OWN_PROCESSES = {"sao_jax/rewards/grader_pool.py", "sao_jax/rewards/grader_worker.py"}
# Hidden tests are compiled to find their mistakes before a sandbox runs them; nothing of them runs here.
COMPILES_ONLY = {"sao_jax/sandbox/verdict.py"}
# Runs code inside of a sandbox, and never in this program: no module imports what it does.
ONLY_INSIDE = {"sao_jax/sandbox/python_driver.py"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def unsafe_places(source: str) -> list[str]:
  """Imports of modules that execute what they load, calls that evaluate text, and numpy loads that allow pickles."""
  found = []
  for node in ast.walk(ast.parse(source)):
    names = []
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      names = [node.module or ""]
    found += [name for name in names if name.split(".")[0] in UNSAFE_MODULES]
    if isinstance(node, ast.Call):
      if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
        found.append(node.func.id)
      call = ast.unparse(node.func)
      allowed = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}.get("allow_pickle")
      if call in ("np.load", "numpy.load") and allowed != "False" or call == "torch.load":
        found.append(call)
  return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_source_unpickles_or_evaluates(path):
  name = str(path.relative_to(REPOSITORY))
  expected = {"pickle"} if name in BETWEEN_OWN_PROCESSES else {"compile"} if name in COMPILES_ONLY else set()
  expected = {"eval", "exec", "compile"} if name in ONLY_INSIDE else expected
  assert set(unsafe_places(path.read_text(encoding="utf-8"))) == expected


def test_what_a_grader_process_answers_is_never_unpickled():
  assert "pickle.load" not in (REPOSITORY / "sao_jax/rewards/grader_pool.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
  "source",
  [
    "import pickle",
    "from dill import loads",
    "eval(text)",
    "np.load(file)",
    "np.load(file, allow_pickle=True)",
    "torch.load(path)",
  ],
)
def test_the_search_finds_them(source):
  assert unsafe_places(source)


class Trap:
  """Leaves a file behind when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return (pathlib.Path.touch, (self.path,))


def pickled_archives(trap):
  """A bare pickle, and numpy archives with a pickled array in the place of the document or of an array."""
  objects = np.array([trap], dtype=object)
  document = np.frombuffer(json.dumps({"a": {host_state._ARRAY: "array_0"}}).encode(), np.uint8)
  for arrays in ({host_state._DOCUMENT: objects}, {host_state._DOCUMENT: document, "array_0": objects}):
    file = io.BytesIO()
    np.savez(file, **arrays)
    yield file.getvalue()
  yield pickle.dumps(trap)


def test_a_pickle_in_a_checkpoint_or_record_is_not_loaded(tmp_path):
  touched = tmp_path / "touched"
  record = Record(tmp_path, "train")
  record.directory.mkdir(parents=True)
  for archive in pickled_archives(Trap(touched)):
    with pytest.raises(ValueError):
      decode(archive)
    record._path(1).write_bytes(archive)
    with pytest.raises(ValueError):
      record.read(1)
  assert not touched.exists()
  pickle.loads(pickle.dumps(Trap(touched)))
  assert touched.exists()  # the trap works


@pytest.mark.parametrize(
  "override", ["training.seed", "model.checkpoint", "rollout.row_lengths", "environment", "algorithm.epsilon_low"]
)
def test_what_a_command_line_sets_is_not_evaluated(tmp_path, monkeypatch, override):
  touched = tmp_path / "touched"
  text = f"__import__('pathlib').Path({str(touched)!r}).touch()"
  monkeypatch.chdir(tmp_path)
  arguments = ["train", f"--config={training_toy.__file__}", f"--workdir={tmp_path}", f"--config.{override}={text}"]
  if override == "model.checkpoint":
    with pytest.raises(ConfigError):
      config, _ = _flags.parse(arguments, flags.FlagValues())
      raise ConfigError("model.checkpoint", f"{config.model.checkpoint} is text", "as it should be")
  else:
    with pytest.raises(ConfigError):
      _flags.parse(arguments, flags.FlagValues())
  assert not touched.exists()
