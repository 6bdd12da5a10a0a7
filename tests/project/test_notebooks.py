"""Every notebook runs from top to bottom, with the library and nothing else."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

import nbformat
import pytest
from toys import processes
from toys.paths import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


@pytest.mark.timeout(900)  # it has ten minutes
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
  nbclient = pytest.importorskip("nbclient", reason="needs the extra `notebooks`")
  monkeypatch.setenv("XLA_FLAGS", processes.environment()["XLA_FLAGS"])  # one device, as at home
  notebook = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
  errors = [output for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "error"]
  assert not errors
  if path.stem == "01_tour":
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    shapes = re.findall(r"^shapes: (.*)$", printed, re.MULTILINE)
    names = [re.findall(r"(\w+) \(\d+,\)", line) for line in shapes]
    assert names == [
      ["id", "sampled", "mu", "version"],
      ["mu", "pi", "ratio", "entropy"],
      ["sampled", "reward", "A_of_V0", "V", "A"],
    ]


def install_cell() -> str:
  """The source of the tour's install cell."""
  notebook = nbformat.read(REPOSITORY / "notebooks" / "01_tour.ipynb", as_version=4)
  (cell,) = (cell for cell in notebook.cells if cell.source.startswith("# The one install cell"))
  return cell.source


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
  exec(compile(install_cell(), "install cell", "exec"), {})
  install = [sys.executable, "-m", "pip", "install", "--quiet", "-e", f"{REPOSITORY}[envs,report]"]
  assert commands == ([install] if missing else [])
  assert sys.path[0] == str(REPOSITORY)


def test_the_install_cell_says_what_to_type_without_the_repository(monkeypatch, tmp_path):
  monkeypatch.setattr(sys, "path", list(sys.path))
  monkeypatch.chdir(tmp_path)
  with pytest.raises(AssertionError, match=r'SOURCE = "https://github.com/NAME/sao_jax.git"'):
    exec(compile(install_cell(), "install cell", "exec"), {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(path):
  notebook = nbformat.read(path, as_version=4)
  assert not any(cell.get("outputs") for cell in notebook.cells)
