"""The folder of a run, held by one process, which records its configuration there once it has begun."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from sao_jax.bucket_lock import bucket_lock
from sao_jax.config import RunConfig
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
  processes, patience = all_processes(), config.training.lock_seconds
  files = mirror_folder(workdir, processes.index)
  with contextlib.ExitStack() as held:
    # On a disk the kernel tells who lives; in a bucket that is true of this machine only.
    with processes.busy():
      first = processes.is_writer
      local = held.enter_context(run_lock(files, patience=patience, first_process=first))
      lock = bucket_lock(workdir, local.holder, patience=patience, dead=local.dead, first_process=first)
      renew = held.enter_context(lock)
      mirror = held.enter_context(mirrored(workdir, files, before=renew))
    processes.equal("the run", [config.name, config.training.seed, str(workdir)])  # and the first one holds the lock
    begun = any(step.name.isdigit() for phase in PHASES for step in (workdir / phase).glob("*"))
    check_same_run(config, files, begun=begun)

    def record() -> None:
      if processes.is_writer:
        write_config(config, files)

    yield RunFolder(files, record, mirror.store)
