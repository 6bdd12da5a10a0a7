"""The folder of a run, held by one process, which records its configuration there once it has begun."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator

from sao_jax.config import RunConfig
from sao_jax.configuration.run_record import check_same_run, write_config
from sao_jax.parallel.agreement import all_processes
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
  processes = all_processes()
  with run_lock(workdir, patience=config.training.lock_seconds, first_process=processes.is_writer):
    processes.equal("the run", [config.name, config.training.seed, str(workdir)])  # and the first one holds the lock
    begun = any(step.name.isdigit() for phase in PHASES for step in (workdir / phase).glob("*"))
    check_same_run(config, workdir, begun=begun)

    def record() -> None:
      if processes.is_writer:
        write_config(config, workdir)

    yield record
