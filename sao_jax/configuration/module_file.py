"""A Python file of the user's, run as a module: a configuration, with what lies beside it."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types


def load_module(file: pathlib.Path) -> types.ModuleType | None:
  """Runs a file and returns its module; None when it is not a Python file. Its errors are shown as they are.

  What lies in the same folder can be imported by it, unless something installed has the same name.
  """
  file = file.absolute()
  name = f"sao_jax_config_{file.stem}"
  spec = importlib.util.spec_from_file_location(name, file)
  if spec is None or spec.loader is None or file.suffix != ".py":
    return None

  folder = str(file.parent)
  if folder not in sys.path:
    sys.path.append(folder)  # at the end: configs/reasoning_gym.py must not hide the package of that name
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # dataclasses look their module up
  spec.loader.exec_module(module)
  return module
