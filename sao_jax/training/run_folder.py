"""The folder of a run, held by one process, which records its configuration there once it has begun."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from absl import logging

from sao_jax.config import RunConfig
from sao_jax.configuration.paths import in_bucket
from sao_jax.configuration.run_record import check_same_run, write_config
from sao_jax.mirror import mirror_folder, mirrored
from sao_jax.parallel.agreement import all_processes
from sao_jax.run_lock import run_lock
from sao_jax.training.phases import PHASES


class RunFolder(NamedTuple):
  """The folder of a run that this process holds.

  Attributes:
    files: the place of metrics, episodes and other small files; the folder itself, unless that is in a bucket.
    record: writes config.json.
    store: has what stands in `files` be in the folder when it returns.
  """

  files: pathlib.Path
  record: Callable[[], None]
  store: Callable[[], None]


@contextlib.contextmanager
def open_run(config: RunConfig, workdir: pathlib.Path) -> Iterator[RunFolder]:
  """Holds the folder; nothing in it changes before `record` of what it yields is called.

  Call that when all that the folder holds was compared with `config`: a command that is refused must leave the record
  of the run as it is.

  Raises:
    ConfigError: another process holds the folder, or it holds checkpoints of a run with another name or seed.
  """
  processes = all_processes()
  files = mirror_folder(workdir, processes.index)
  with (
    run_lock(files, patience=config.training.lock_seconds, first_process=processes.is_writer),
    mirrored(workdir, files) as mirror,
  ):
    if in_bucket(workdir):
      logging.warning("%s is in a bucket: a second run in it, on another machine, would not be noticed.", workdir)
    processes.equal("the run", [config.name, config.training.seed, str(workdir)])  # and the first one holds the lock
    begun = any(step.name.isdigit() for phase in PHASES for step in (workdir / phase).glob("*"))
    check_same_run(config, files, begun=begun)

    def record() -> None:
      if processes.is_writer:
        write_config(config, files)

    yield RunFolder(files, record, mirror.store)
