"""Every notebook runs from top to bottom, with the library and nothing else."""

from __future__ import annotations

import pathlib

import nbformat
import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
  nbclient = pytest.importorskip("nbclient", reason="needs the extra `notebooks`")
  monkeypatch.setenv("XLA_FLAGS", "")  # one device, as at home
  notebook = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
  errors = [output for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "error"]
  assert not errors


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(path):
  notebook = nbformat.read(path, as_version=4)
  assert not any(cell.get("outputs") for cell in notebook.cells)
