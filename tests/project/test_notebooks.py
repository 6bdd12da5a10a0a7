"""Every notebook runs from top to bottom, and what is stored in it is what it prints."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import platform
import re
import subprocess
import sys

import nbformat
import numpy as np
import pytest
from tools import notebooks
from toys import processes
from toys.paths import ABSOLUTE_PATH, REPOSITORY

each_notebook = pytest.mark.parametrize("path", notebooks.paths(), ids=lambda path: path.stem)
PICTURE = 100_000  # characters, of the longest one
CELL, FUNCTION = 45, 20  # lines of the longest ones
# Folders of a machine; addresses have a host before them.
MEMORY = re.compile(r"\b0x[0-9a-f]{6,}")


def imported_rooms(code: str) -> set[str]:
  """The top-level packages that code imports from."""
  found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
  return {node.module.partition(".")[0] for node in found}


def code(notebook) -> str:
  """All code of a notebook, without magics of IPython."""
  cells = [cell.source for cell in notebooks.code_cells(notebook) if cell.id != notebooks.INSTALL]
  return re.sub(r"^%.*$", "", "\n".join(cells), flags=re.MULTILINE)


def definitions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
  return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.timeout(900)  # it has ten minutes
@each_notebook
def test_notebook_runs_and_prints_what_is_stored(path, monkeypatch):
  pytest.importorskip("nbclient", reason="needs the extra `notebooks`")
  monkeypatch.setenv("XLA_FLAGS", processes.environment()["XLA_FLAGS"])  # one device, as at home
  stored, run = notebooks.read(path), notebooks.read(path)
  notebooks.execute(run)  # raises what a cell raises
  notebooks.tidy(run)

  # Numbers differ in their last digits, with other compilers; where much differs, only the kinds of outputs count.
  for old, new in zip(notebooks.code_cells(stored), notebooks.code_cells(run), strict=True):
    before, after = notebooks.contents(old), notebooks.contents(new)
    assert [each[:2] for each in before] == [each[:2] for each in after], f"cell {old.id}: run launch/notebooks.sh"
    for (*_, first), (*_, second) in zip(before, after):
      if not notebooks.cell_varies(old):
        np.testing.assert_allclose(second, first, rtol=0.02, atol=2e-3, err_msg=f"cell {old.id}: stored is the second")


@each_notebook
def test_outputs_are_stored_and_are_those_of_the_code(path):
  notebook = notebooks.read(path)
  cells = notebooks.code_cells(notebook)
  assert notebook.metadata["sao_jax"]["outputs_of"] == notebooks.sources(notebook), "run launch/notebooks.sh"
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  assert notebooks.pictures(notebook)


@each_notebook
def test_what_is_stored_names_no_machine_and_is_small(path):
  notebook = notebooks.read(path)
  said = json.dumps([cell.outputs for cell in notebooks.code_cells(notebook)])
  assert not ABSOLUTE_PATH.search(said) and not MEMORY.search(said) and str(REPOSITORY) not in said
  assert len(platform.node()) < 4 or platform.node() not in said
  assert max(map(len, notebooks.pictures(notebook))) < PICTURE
  assert path.stat().st_size < 1_000_000

  # Nothing differs between two machines that run the same.
  tidied = nbformat.from_dict(notebook)
  notebooks.tidy(tidied)
  assert tidied == notebook


@each_notebook
def test_a_notebook_begins_with_its_badge_and_the_shared_install_cell(path):
  notebook, shared = notebooks.read(path), notebooks.read(path)
  notebooks.share(path, shared, notebooks.install_source())
  assert shared == notebook
  first, second = notebook.cells[:2]
  assert first.source.startswith("# ") and f"/notebooks/{path.name})" in first.source
  assert second.id == notebooks.INSTALL
  assert not second.outputs


@each_notebook
def test_cells_have_names_and_are_short(path):
  notebook = notebooks.read(path)
  names = [cell.id for cell in notebook.cells]
  assert len(set(names)) == len(names)
  assert not [name for name in names if not re.fullmatch(r"[a-z]+[a-z0-9-]*", name)]
  for cell in notebooks.code_cells(notebook):
    assert len(cell.source.splitlines()) <= CELL, cell.id


@each_notebook
def test_a_notebook_shows_the_library_and_has_no_second_one(path):
  written = code(notebooks.read(path))
  assert "sao_jax" in imported_rooms(written)
  # Methods have the names of the protocols that they implement; so have wrappers of programs, which call them.
  tree = ast.parse(written)
  methods = {each for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in definitions(node)}
  own = {node.name for node in definitions(tree) if node not in methods and not node.name.startswith("_")}
  allowed = {"extend", "decode"}
  library = {
    node.name
    for file in (REPOSITORY / "sao_jax").rglob("*.py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
  }
  assert not own & library - allowed
  for node in definitions(tree):
    assert node.end_lineno - node.lineno < FUNCTION, node.name


def test_the_cells_that_the_page_of_equations_names_exist():
  page = (REPOSITORY / "sao_jax" / "algorithm" / "README.md").read_text(encoding="utf-8")
  rows = re.findall(r"\| (\d\d) ((?:`[a-z-]+`(?:, )?)+) \|$", page, re.MULTILINE)
  assert len(rows) > 5
  for number, names in rows:
    (path,) = notebooks.FOLDER.glob(f"{number}_*.ipynb")
    assert set(re.findall(r"`([a-z-]+)`", names)) <= {cell.id for cell in notebooks.read(path).cells}


def test_all_notebooks_are_listed():
  listed = re.findall(r"\]\((\w+\.ipynb)\) \|", (notebooks.FOLDER / "README.md").read_text(encoding="utf-8"))
  assert listed == [path.name for path in notebooks.paths()]


def test_an_address_is_that_of_all_badges_and_of_the_install_cell(tmp_path, monkeypatch):
  for path in notebooks.paths():
    (tmp_path / path.name).write_bytes(path.read_bytes())
  monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
  monkeypatch.setattr(notebooks, "TOUR", tmp_path / "01_tour.ipynb")
  notebooks.main(["--address=https://github.com/someone/fork.git"])
  for path in notebooks.paths():
    notebook = notebooks.read(path)
    assert f"/github/someone/fork/blob/main/notebooks/{path.name})" in notebook.cells[0].source
    assert 'SOURCE = "https://github.com/someone/fork.git"' in notebook.cells[1].source
    assert notebook.metadata["sao_jax"]["outputs_of"] == notebooks.sources(notebook)


def test_what_a_run_leaves_behind_is_tidied():
  log = nbformat.v4.new_output("stream", name="stderr", text="I1201 12:00:00 7 train 1/2")
  prints = [nbformat.v4.new_output("stream", text=text) for text in ("loss 0.5\n", "at -1e-3\n")]
  figure = nbformat.v4.new_output("display_data", {"image/png": "AAAA", "text/plain": "<Figure size 640x480>"})
  cell = nbformat.v4.new_code_cell(
    "1", outputs=[prints[0], log, prints[1], figure], metadata={"execution": {"iopub.status.busy": "now"}}
  )
  notebook = nbformat.v4.new_notebook(cells=[cell])
  notebooks.tidy(notebook)
  (cell,) = notebook.cells
  assert notebooks.contents(cell) == [("stdout", "loss # at #", [0.5, -0.001]), ("image/png", "", [])]
  assert cell.metadata == {} and len(notebooks.pictures(notebook)) == 1

  cell.metadata["tags"] = [notebooks.VARIES]
  notebooks.tidy(notebook)
  assert notebooks.contents(notebook.cells[0]) == [("stdout", "", []), ("image/png", "", [])]


@pytest.mark.parametrize("missing", [None, "sao_jax", "matplotlib", "jinja2"])
def test_the_install_cell_installs_what_the_notebook_lacks(monkeypatch, missing):
  commands = []

  def version(name):
    if name == missing:
      raise importlib.metadata.PackageNotFoundError(name)
    return "1.0"

  monkeypatch.setattr(importlib.metadata, "version", version)
  monkeypatch.setattr(subprocess, "run", lambda command, **options: commands.append(command))
  monkeypatch.setattr(sys, "path", list(sys.path))
  monkeypatch.chdir(REPOSITORY / "notebooks")
  exec(compile(notebooks.install_source(), "install cell", "exec"), {})
  install = [sys.executable, "-m", "pip", "install", "--quiet", "-e", f"{REPOSITORY}[report]"]
  assert commands == ([install] if missing else [])
  assert sys.path[0] == str(REPOSITORY)


def test_the_install_cell_says_what_to_type_without_the_repository(monkeypatch, tmp_path):
  monkeypatch.setattr(sys, "path", list(sys.path))
  monkeypatch.chdir(tmp_path)
  cell = notebooks.install_source("https://github.com/NAME/sao_jax")
  with pytest.raises(AssertionError, match=r'SOURCE = "https://github.com/NAME/sao_jax.git"'):
    exec(compile(cell, "install cell", "exec"), {})


def test_the_install_cell_clones_the_address_in_colab(monkeypatch, tmp_path):
  commands = []
  monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
  monkeypatch.setattr(subprocess, "run", lambda command, **options: commands.append(command))
  monkeypatch.setattr(sys, "path", list(sys.path))
  monkeypatch.chdir(tmp_path)
  exec(compile(notebooks.install_source("https://github.com/someone/fork"), "install cell", "exec"), {})
  assert commands == [["git", "clone", "--quiet", "https://github.com/someone/fork.git", str(tmp_path / "sao_jax")]]
