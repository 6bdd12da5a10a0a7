"""Notebooks: executes them and stores what they print and draw, so that they can be read without being run.

    launch/notebooks.sh [--address=https://github.com/OWNER/sao_jax] [NAME ...]

All begin with a title and a badge, and with the tour's install cell. What is stored is that of a run from top to bottom
on CPUs, without what differs from run to run for no reason: what was logged while something trained, and times.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import nbformat

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "notebooks"
TOUR = FOLDER / "01_tour.ipynb"

INSTALL = "install"  # the id of the install cell
VARIES = "varies"  # the tag of cells that print other numbers and words each time, as training does
SECONDS = 600  # a cell may take

COLAB = "https://colab.research.google.com"
BADGE = re.compile(r"^\[!\[Open in Colab\].*$", re.MULTILINE)
ADDRESS = re.compile(r'^SOURCE = "(https://[^"]+)\.git"', re.MULTILINE)
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", re.IGNORECASE)

Notebook = nbformat.NotebookNode
# The kind of an output, its words without numbers, and its numbers.
Content = tuple[str, str, list[float]]


def paths() -> list[pathlib.Path]:
  """All notebooks, in the order in which they are read."""
  return sorted(FOLDER.glob("*.ipynb"))


def read(path: pathlib.Path) -> Notebook:
  return nbformat.read(path, as_version=4)


def code_cells(notebook: Notebook) -> list[Notebook]:
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook: Notebook) -> None:
  """Runs all cells in a new kernel, in the folder of the notebooks; an error of a cell is raised."""
  import nbclient  # an optional extra

  where = {"metadata": {"path": str(FOLDER)}}
  nbclient.NotebookClient(notebook, timeout=SECONDS, resources=where, record_timing=False).execute()


def sources(notebook: Notebook) -> str:
  """A hash of the code that the stored outputs are those of; the install cell prints nothing, and may change."""
  code = [cell.source for cell in code_cells(notebook) if cell.id != INSTALL]
  return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def tidy(notebook: Notebook) -> None:
  """Leaves in outputs and metadata what is worth a line of a commit."""
  for cell in notebook.cells:
    tags = cell.metadata.get("tags")
    cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
  for cell in code_cells(notebook):
    cell.outputs = [_tidied(output) for output in _joined(cell.outputs)]

  # The versions of Python and of the kernel are those of a machine.
  notebook.metadata = nbformat.from_dict(
    {
      "colab": {"provenance": []},
      "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
      "language_info": {"name": "python"},
      "sao_jax": {"outputs_of": sources(notebook)},
    }
  )


def _joined(outputs: Sequence[Notebook]) -> list[Notebook]:
  """Without what was logged, and with what was printed in one piece, however many messages it came in."""
  joined = []
  for output in outputs:
    if output.output_type != "stream":
      joined.append(output)
    elif output.name == "stdout":
      if joined and joined[-1].output_type == "stream":
        joined[-1].text += output.text
      else:
        joined.append(output)
  return joined


def _tidied(output: Notebook) -> Notebook:
  data = output.get("data", {})
  if "image/png" in data:
    data.pop("text/plain", None)  # the size of a figure
  return output


def contents(cell: Notebook) -> list[Content]:
  """What a cell's outputs say, for a comparison: pictures by their kind alone, text by its words and its numbers."""
  found = []
  for output in cell.outputs:
    data = output.get("data", {})
    kind = "stdout" if output.output_type == "stream" else " ".join(sorted(data))
    text = output.text if kind == "stdout" else data.get("text/plain", "")
    if cell_varies(cell):
      text = ""
    words = " ".join(NUMBER.sub(" # ", text).split())
    found.append((kind, words, [float(number) for number in NUMBER.findall(text)]))
  return found


def cell_varies(cell: Notebook) -> bool:
  return VARIES in cell.metadata.get("tags", [])


def badge(path: pathlib.Path, address: str) -> str:
  """The badge that opens a notebook of `address`, the repository's on GitHub, in Colab."""
  name = address.removeprefix("https://github.com/")
  target = f"{COLAB}/github/{name}/blob/main/notebooks/{path.name}"
  return f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({target})"


def install_source(address: str | None = None) -> str:
  """The tour's install cell, with another address of the repository if there is one."""
  (cell,) = (cell for cell in read(TOUR).cells if cell.id == INSTALL)
  return ADDRESS.sub(f'SOURCE = "{address}.git"', cell.source) if address else cell.source


def share(path: pathlib.Path, notebook: Notebook, install: str) -> None:
  """Puts into a notebook what all have: the badge under the title, and the install cell behind it."""
  (address,) = ADDRESS.findall(install)
  first, second = notebook.cells[:2]
  title, _, text = BADGE.sub("", first.source).partition("\n")
  first.source = f"{title}\n\n{badge(path, address)}\n\n{text.strip()}"
  if second.id != INSTALL:
    second = nbformat.v4.new_code_cell(install, id=INSTALL)
    notebook.cells.insert(1, second)
  second.source = install


def write(path: pathlib.Path, notebook: Notebook) -> None:
  nbformat.validate(notebook)
  nbformat.write(notebook, path)


def main(arguments: Sequence[str]) -> None:
  """Executes the notebooks that are named, or all, and stores them."""
  parser = argparse.ArgumentParser(prog="launch/notebooks.sh", description=__doc__.partition("\n")[0])
  parser.add_argument("names", nargs="*", metavar="NAME", help="as in 01_tour; all without any")
  parser.add_argument("--address", help="of the repository, as in https://github.com/OWNER/sao_jax: of all notebooks")
  options = parser.parse_args(arguments)
  known = {path.stem: path for path in paths()}
  if unknown := [name for name in options.names if name not in known]:
    parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")

  # A new address is no reason to run anything.
  if options.address:
    install = install_source(options.address.removesuffix(".git").removesuffix("/"))
    for path in known.values():
      notebook = read(path)
      share(path, notebook, install)
      write(path, notebook)
    return

  for name in options.names or known:
    began, notebook = time.monotonic(), read(known[name])
    share(known[name], notebook, install_source())
    execute(notebook)
    tidy(notebook)
    write(known[name], notebook)
    sys.stdout.write(f"{name}: {time.monotonic() - began:.0f} s, {_kilobytes(notebook)} kB of pictures\n")


def _kilobytes(notebook: Notebook) -> int:
  return sum(len(data) for data in pictures(notebook)) // 1000


def pictures(notebook: Notebook) -> list[Any]:
  """The pictures of a notebook, as they are stored."""
  data = [output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs]
  return [content for each in data for kind, content in each.items() if kind.startswith("image/")]


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  main(sys.argv[1:])
