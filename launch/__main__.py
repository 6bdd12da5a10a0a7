"""Lists the programs: python -m launch."""

from __future__ import annotations

import ast
import pathlib
import sys


def main() -> None:
  """Prints every program with the first line of its docstring."""
  sys.stdout.write("Programs, each with --help, as in python -m launch.train --help:\n\n")
  for file in sorted(pathlib.Path(__file__).parent.glob("[!_]*.py")):
    purpose = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    sys.stdout.write(f"  launch.{file.stem:<16} {purpose}\n")


if __name__ == "__main__":
  main()
