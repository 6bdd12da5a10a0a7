"""Compiled programs are kept between the commands of a user: a second one of the same shapes compiles nothing."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
import platform
import tempfile

import jax
from absl import logging

LARGEST = 4 * 2**30  # bytes; the programs that were not used for longest give way
LEAST_SECONDS = 0.3  # of compilation, for a program to be kept


def enable() -> None:
  """Has jax keep what it compiles in `$XDG_CACHE_HOME/sao_jax`, by default `~/.cache/sao_jax`; says so if it cannot.

  A user's own choice comes first: JAX_COMPILATION_CACHE_DIR, even an empty one, which turns this off. Several processes
  may use the folder at the same time.
  """
  if "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.jax_compilation_cache_dir:
    return
  folder = _folder()
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
  except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
    logging.info("Compiled programs are not kept: cannot write to %s (%s).", folder, error)
    return

  jax.config.update("jax_compilation_cache_dir", str(folder))
  if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
  bounded = importlib.util.find_spec("filelock") is not None  # which jax needs to count bytes
  if bounded and "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
    jax.config.update("jax_compilation_cache_max_size", LARGEST)


def _folder() -> pathlib.Path:
  """One folder per kind of processor: homes are shared between machines, and programs for CPUs are not."""
  root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  features = [platform.machine()]
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    features += [line for line in lines if line.startswith(("flags", "Features"))][:1]
  except OSError:  # not Linux
    features.append(platform.processor())
  name = hashlib.sha256("\n".join(features).encode()).hexdigest()[:12]
  return pathlib.Path(root, "sao_jax", "compiled", f"{platform.machine()}-{name}")
