"""A small repository with a bug, its hidden tests, and pytest where a sandbox sees it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from sao_jax.environments.repository_task import RepositoryTask
from sao_jax.sandbox import SandboxLimits

MIB = 2**20
FILES = {
  "calc/__init__.py": '"""Sums."""\n\n\ndef add(a, b):\n  return a - b\n\n\ndef twice(a):\n  return 2 * a\n',
  "tests/helper.py": "def same(a, b):\n  assert a == b\n",
  "tests/test_calc.py": "from calc import twice\n\n\ndef test_twice():\n  assert twice(3) == 6\n",
  "pytest.ini": "[pytest]\naddopts = -p no:warnings\n",
}
ADDED = """import unittest

import pytest
from calc import add
from helper import same


def test_add():
  assert add(2, 3) == 5


@pytest.mark.parametrize("a", [1, 2])
def test_same(a):
  same(add(a, a), 2 * a)


def test_refuses():
  with pytest.raises(TypeError):
    add(1, "1")
  assert add(1, 1) > 0


class TestSums(unittest.TestCase):
  def test_sum(self):
    self.assertEqual(add(1, 1), 2)
"""
PATH = "tests/test_add.py"
FIX = "sed -i 's/a - b/a + b/' calc/__init__.py"
GOLD = """diff --git a/calc/__init__.py b/calc/__init__.py
--- a/calc/__init__.py
+++ b/calc/__init__.py
@@ -4,2 +4,2 @@
 def add(a, b):
-  return a - b
+  return a + b
"""


def new_file(path: str, text: str) -> str:
  """Writes the diff that creates a file."""
  lines = text.splitlines()
  return f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)


RECORD = {
  "instance_id": "toy__calc-1",
  "repo": "toy/calc",
  "base_commit": "",
  "problem_statement": "add(2, 3) is -1, and should be 5.",
  "snapshot": FILES,
  "test_patch": new_file(PATH, ADDED),
  "patch": GOLD,
  "FAIL_TO_PASS": [
    *(f"{PATH}::{name}" for name in ("test_add", "test_same[1]", "test_same[2]", "test_refuses", "TestSums::test_sum")),
  ],
  "PASS_TO_PASS": json.dumps(["tests/test_calc.py::test_twice"]),
}
LIMITS = SandboxLimits(memory=512 * MIB, processes=32, disk=16 * MIB, files=1000, file_bytes=8 * MIB)


@contextlib.contextmanager
def shown_pytest() -> Iterator[str]:
  """Copies pytest into a folder that sandboxes may be shown: neither a home nor below /tmp."""
  folder = tempfile.mkdtemp(dir="/var/tmp")
  os.chmod(folder, 0o755)
  try:
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
      for file in importlib.metadata.files(name) or ():
        if file.parts[0] != "..":
          target = pathlib.Path(folder, *file.parts)
          target.parent.mkdir(parents=True, exist_ok=True)
          with contextlib.suppress(FileNotFoundError):  # bytecode that was listed and never written
            shutil.copy2(file.locate(), target)
    yield folder
  finally:
    shutil.rmtree(folder)


def write_records(folder: pathlib.Path, *records: dict) -> str:
  """Writes a file of records, by default the one."""
  path = folder / "tasks.jsonl"
  path.write_text("".join(f"{json.dumps(record)}\n" for record in records or (RECORD,)))
  return str(path)


def make_task(data: str, **settings) -> RepositoryTask:
  """Makes settings for small repositories, with a split in which every record is trained on."""
  return RepositoryTask(data, heldout_data=data, limits=LIMITS, call_timeout=30.0, test_timeout=60.0, **settings)
