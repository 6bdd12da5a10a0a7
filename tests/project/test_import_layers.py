"""The rules of the architecture: rooms import from rooms above, optional packages stay optional, files stay small."""

from __future__ import annotations

import ast
import collections
import pathlib
import statistics
import subprocess
import sys

import pytest
from toys.paths import REPOSITORY

PACKAGE = REPOSITORY / "sao_jax"

# From the ground up: a room imports from itself and from the rooms before it. Nothing imports upwards.
ROOMS = (
  *("errors", "settings", "json_values", "missing_folder", "config", "configuration", "episode", "interrupt"),
  *("background", "run_lock", "bucket_lock", "mirror", "announce", "types"),
  *("parallel", "models", "sampler", "algorithm", "checkpoints", "huggingface"),
  *("rewards", "sandbox", "data", "chat", "environments", "gateway", "rollout"),
  *("report", "learner", "evaluation", "training", "benchmarks", "study", "pod", "launch"),
)
# The algorithm knows no model, no mesh and no sampler.
ALGORITHM_MAY_USE = {"errors", "config", "types", "algorithm"}
WITHOUT_JAX = ("environments", "gateway", "rewards", "sandbox", "data", "chat")
# Of the package's own modules, those that rooms without jax may use: `types` itself imports jax.
NO_JAX_MODULES = {"errors", "settings", "json_values", "missing_folder", "config", "episode", *WITHOUT_JAX}
CORE_ABOVE_JAX = {"jax", "jaxlib", "flax", "optax", "chex", "orbax"}
OPTIONAL = (
  *("transformers", "tokenizers", "safetensors", "jinja2", "reasoning_gym", "math_verify"),
  *("matplotlib", "tensorboardX", "libtpu", "tokamax", "torch", "gcsfs", "fsspec", "pyarrow"),
  *("starlette", "uvicorn", "openai", "textarena", "nltk", "verifiers", "openenv", "websockets", "wandb", "trackio"),
)


def python_files() -> list[pathlib.Path]:
  return sorted([*PACKAGE.rglob("*.py"), *(REPOSITORY / "launch").glob("*.py"), *(REPOSITORY / "configs").glob("*.py")])


def room_of(path: pathlib.Path) -> str:
  parts = path.relative_to(REPOSITORY).with_suffix("").parts
  return parts[1] if parts[0] == "sao_jax" else "launch"


def imported_modules(path: pathlib.Path) -> list[tuple[int, str]]:
  """(line, dotted name) of every import statement, those inside functions included, `TYPE_CHECKING` ones not."""
  tree = ast.parse(path.read_text(encoding="utf-8"))
  skipped = {
    id(node)
    for guard in ast.walk(tree)
    if isinstance(guard, ast.If) and "TYPE_CHECKING" in ast.unparse(guard.test)
    for node in ast.walk(guard)
  }
  found = []
  for node in ast.walk(tree):
    if id(node) in skipped:
      continue
    if isinstance(node, ast.Import):
      found += [(node.lineno, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}:{node.lineno}: relative import"
      found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
  return found


def may_import(importer: str, imported: str) -> bool:
  if importer == "algorithm":
    return imported in ALGORITHM_MAY_USE
  return ROOMS.index(imported) <= ROOMS.index(importer)


def test_rooms_import_only_from_above():
  wrong = []
  for path in python_files():
    for line, name in imported_modules(path):
      first, *rest = name.split(".")
      if first not in ("sao_jax", "launch", "configs") or not rest:
        continue
      importer, imported = room_of(path), rest[0] if first == "sao_jax" else "launch"
      if importer != "__init__" and not may_import(importer, imported):
        wrong.append(f"{path.relative_to(REPOSITORY)}:{line} imports {name}")
  assert not wrong, "\n".join(wrong)


def test_the_rule_itself():
  assert (
    may_import("training", "rollout") and may_import("environments", "rewards") and may_import("models", "parallel")
  )
  assert not may_import("models", "algorithm") and not may_import("algorithm", "models")
  assert not may_import("rollout", "training") and not may_import("sampler", "rollout")


def test_rooms_without_jax_do_not_import_it():
  wrong = []
  for path in python_files():
    if room_of(path) not in WITHOUT_JAX:
      continue
    for line, name in imported_modules(path):
      first, *rest = name.split(".")
      if first in CORE_ABOVE_JAX or (first == "sao_jax" and rest and rest[0] not in NO_JAX_MODULES):
        wrong.append(f"{path.relative_to(REPOSITORY)}:{line} imports {name}")
  assert not wrong, "\n".join(wrong)


def test_optional_packages_are_imported_where_they_are_used():
  wrong = []
  for path in PACKAGE.rglob("*.py"):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
      names = []
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
      wrong += [f"{path}:{node.lineno} {name}" for name in names if name.split(".")[0] in OPTIONAL]
  assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("blocked, modules", [(OPTIONAL, PACKAGE), ((*OPTIONAL, *sorted(CORE_ABOVE_JAX)), WITHOUT_JAX)])
def test_every_module_imports_without(blocked, modules):
  """In a fresh interpreter where the blocked packages cannot be imported, as if they were not installed."""
  folders = [PACKAGE] if modules is PACKAGE else [PACKAGE / room for room in modules]
  names = []
  for folder in folders:
    for path in sorted(folder.rglob("*.py")):
      name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
      names.append(name)
  program = (
    "import importlib, sys\n"
    f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
    f"for name in {names!r}:\n"
    "  importlib.import_module(name)\n"
  )
  done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr


def test_files_stay_small():
  sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
  tests = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (REPOSITORY / "tests").rglob("*.py")}
  too_long = [f"{path.relative_to(REPOSITORY)}: {lines}" for path, lines in (sizes | tests).items() if lines > 500]
  assert not too_long, "\n".join(too_long)
  assert statistics.median(sizes.values()) <= 150


def test_launchers_only_parse_and_call():
  for path in (REPOSITORY / "launch").glob("[!_]*.py"):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 80, f"{path.name} has {lines} lines"


def test_every_public_module_class_and_function_says_what_it_is_for():
  wrong = []
  for path in python_files():
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not ast.get_docstring(tree):
      wrong.append(f"{path.relative_to(REPOSITORY)}: module")
    for node in tree.body:
      is_public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_"
      if is_public and not ast.get_docstring(node):
        wrong.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}: {node.name}")
  assert not wrong, "\n".join(wrong)


def test_no_test_imports_a_test():
  """Helpers live in tests/toys, where what others rely on is seen to be relied on."""
  wrong = []
  for path in sorted((REPOSITORY / "tests").rglob("*.py")):
    for line, name in imported_modules(path):
      if any(part.startswith("test_") for part in name.split(".")) or name.startswith("tests."):
        wrong.append(f"{path.relative_to(REPOSITORY)}:{line} imports {name}")
  assert not wrong, "\n".join(wrong)


def test_no_module_name_stands_twice():
  """Modules, rooms and packages inside rooms: a name alone says which file is meant."""
  paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
  names = collections.Counter(path.parent.name if path.stem == "__init__" else path.stem for path in paths)
  assert not [name for name, count in names.items() if count > 1]
