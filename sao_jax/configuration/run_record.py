"""`config.json` in the folder of a run: the configuration that it has begun with, to compare with and to go on from."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Collection, Iterator
from typing import Any

from absl import logging

from sao_jax.config import RunConfig
from sao_jax.configuration import config_tree
from sao_jax.configuration.rebuild import from_json, is_faithful
from sao_jax.errors import ConfigError

CONFIG_FILE = "config.json"
FAITHFUL = "faithful"  # in the file: False where it does not hold all that the configuration does

# What a model computes, and on what it is measured; how the model computes it may change.
_IDENTITY = ("name", "training.seed", "model.", "environment.")
_OF_A_PROCESS = ("checkpoint", "remat", "dtype", "param_dtype", "moe_implementation", "max_positions")


def write_config(config: RunConfig, workdir: pathlib.Path) -> None:
  """Writes the file, whole or not at all, whatever interrupts it."""
  record = config_tree.to_json(config)
  if not is_faithful(config):
    record[FAITHFUL] = False
  path = workdir / CONFIG_FILE
  temporary = path.with_suffix(f".{os.getpid()}.tmp")
  try:
    temporary.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)  # half of it, on a full disk


def check_same_run(config: RunConfig, workdir: pathlib.Path, *, begun: bool) -> None:
  """Compares with the file, if there is one; logs the fields that differ.

  Args:
    config: of the run that is to start.
    workdir: its folder.
    begun: the folder holds checkpoints, from which it would go on.

  Raises:
    ConfigError: those checkpoints are of a run with another name or seed.
  """
  for field, before, now in _changes(workdir, config):
    if begun and field in ("name", "training.seed"):
      raise ConfigError(
        "--workdir",
        f"{workdir} holds a run with {field}={before!r}, this one has {now!r}.",
        "Pass a --workdir of its own for every run, or the old value to go on with the old run.",
      )
    logging.warning("The configuration differs from the last run's: %s was %s, is %s.", field, before, now)


def check_viewed(config: RunConfig, workdir: pathlib.Path, explicit: Collection[str] = ()) -> None:
  """Refuses to look at a run with the configuration of another one.

  Args:
    config: the one to look with.
    workdir: the run's folder.
    explicit: fields that were set on purpose, which may differ: another seed to sample with, a harder task.

  Raises:
    ConfigError: naming the first field that tells them apart.
  """
  for field, before, now in _changes(workdir, config):
    meant = any(f"{field}.".startswith(f"{name}.") for name in explicit)
    of_process = field.removeprefix("model.").split(".")[0] in _OF_A_PROCESS and field.startswith("model.")
    if meant or of_process or not field.startswith(_IDENTITY) or config_tree.MISSING in (before, now):
      continue
    raise ConfigError(
      "--config",
      f"{workdir} holds a run with {field}={before!r}, this configuration has {now!r}.",
      "Leave --config out, which takes the run's own; what is meant to differ is set as in --config.FIELD=VALUE.",
    )


def _changes(workdir: pathlib.Path, config: RunConfig) -> list[tuple[str, Any, Any]]:
  """Lists (field, recorded value, value) of what differs; nothing without a record."""
  record = _read(workdir)
  if record is None:
    return []
  record.pop(FAITHFUL, None)
  return config_tree.differences(record, config_tree.to_json(config))


def read_config(workdir: pathlib.Path) -> RunConfig:
  """Rebuilds the configuration of the run in `workdir`.

  Raises:
    ConfigError: there is none, or the file does not hold all of it.
  """
  remedy = "Pass the configuration that the run was trained with, as in --config=configs/calculator.py."
  record = _read(workdir)
  if record is None:
    raise ConfigError("--config", f"it is missing, and {workdir / CONFIG_FILE} cannot be read.", remedy)
  if record.get(FAITHFUL, True) is False:
    raise ConfigError("--config", f"it is missing, and {workdir / CONFIG_FILE} could not hold all of it.", remedy)
  try:
    return from_json(record)
  except Exception as error:  # of the user's modules
    files = ", ".join(dict.fromkeys(_files(record)))
    defined = f"; the run's classes stand in {files}, which only --config may run" if files else ""
    problem = f"it is missing, and that of {workdir} cannot be rebuilt ({error!r:.300}){defined}."
    raise ConfigError("--config", problem, remedy) from error


def _files(record: Any) -> Iterator[str]:
  """Yields the files, outside this package, in which the classes of a record stand."""
  if isinstance(record, dict):
    if config_tree.TYPE_KEY in record and config_tree.FILE_KEY in record:
      yield str(record[config_tree.FILE_KEY])
    for value in record.values():
      yield from _files(value)


def _read(workdir: pathlib.Path) -> dict[str, Any] | None:
  try:
    record = json.loads((workdir / CONFIG_FILE).read_text(encoding="utf-8"))
  except (OSError, ValueError):  # none, or cut short: there is nothing to compare with
    return None
  return record if isinstance(record, dict) else None
