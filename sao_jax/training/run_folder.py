"""The folder of a run, held by one process, which records its configuration there once it has begun."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator

import jax

from sao_jax.config import RunConfig
from sao_jax.configuration.run_record import check_same_run, write_config
from sao_jax.run_lock import run_lock
from sao_jax.training.phases import PHASES


@contextlib.contextmanager
def open_run(config: RunConfig, workdir: pathlib.Path) -> Iterator[Callable[[], None]]:
  """Holds the folder; nothing in it changes before the function that it yields is called, which writes config.json.

  Call it when all that the folder holds was compared with `config`: a command that is refused must leave the record of
  the run as it is.

  Raises:
    ConfigError: another process holds the folder, or it holds checkpoints of a run with another name or seed.
  """
  first_process = jax.process_index() == 0
  with run_lock(workdir, patience=config.training.lock_seconds, first_process=first_process):
    begun = any(step.name.isdigit() for phase in PHASES for step in (workdir / phase).glob("*"))
    check_same_run(config, workdir, begun=begun)

    def record() -> None:
      if first_process:
        write_config(config, workdir)

    yield record
