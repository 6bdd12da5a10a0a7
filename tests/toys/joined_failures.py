"""What one of two processes meets alone, while the other waits elsewhere: `joined_failures.py KIND FOLDER`.

* `damage`: a part of the newest checkpoint, then a full disk while the other has begun to save.
* `interrupt`: a second Ctrl-C, while the other looks at nothing.
* `killed`: SIGKILL, of process 0 while the other sleeps.
* `idle`: nothing, and the first one has nothing to do while the other works on.
"""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import sys
import time


def damage(folder: str) -> None:
  """Prints what all restore; then process 1 finds the disk full."""
  import jax
  import numpy as np
  from jax.sharding import NamedSharding, PartitionSpec

  from sao_jax.checkpoints.checkpointer import Checkpointer
  from sao_jax.parallel.agreement import all_processes

  processes, full = all_processes(), []

  def before() -> None:
    if full:
      raise OSError(errno.ENOSPC, "No space left on device")

  # Two checkpoints of an array of which each process holds a half.
  sharding = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))
  values = np.random.default_rng(0).standard_normal(20_000, np.float32)
  state = {"params": {"w": jax.make_array_from_callback(values.shape, sharding, lambda part: values[part])}}
  with Checkpointer(folder, every=1, before=before) as checkpointer:
    for step in (1, 2):
      checkpointer.save(step, state, {"step": step})
    checkpointer.wait()

    # The newest loses what process 1 has written.
    if processes.index == 1:
      for path in pathlib.Path(folder, "2", "policy", "ocdbt.process_1", "d").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    processes.gather("the damage", 0)
    restored = checkpointer.restore(state)
    mine = restored.state["params"]["w"].addressable_shards[0]
    same = np.array_equal(mine.data, values[mine.index])
    sys.stdout.write(f"restored step {restored.step} with host state {restored.host_state}, {same}\n")

    full += [True] * processes.index
    checkpointer.save(3, state, {"step": 3})
    checkpointer.wait()


def interrupt(folder: str) -> None:
  """Process 0 gets two Ctrl-C; process 1 sleeps."""
  from sao_jax.interrupt import Interrupt
  from sao_jax.parallel.agreement import all_processes

  processes = all_processes()
  with Interrupt():
    processes.gather("ready", 0)
    for _ in range(2 * (processes.index == 0)):
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(0.5)
    time.sleep(120)


def killed(folder: str) -> None:
  """Process 0 is killed; process 1 sleeps."""
  from sao_jax.parallel.agreement import all_processes

  processes = all_processes()
  processes.gather("ready", 0)
  if processes.index == 0:
    os.kill(os.getpid(), signal.SIGKILL)
  time.sleep(120)


def idle(folder: str) -> None:
  """Process 1 works for longer than jax waits for it when process 0 leaves."""
  from sao_jax.parallel.agreement import all_processes

  if all_processes().index == 1:
    time.sleep(8)
  sys.stdout.write("done\n")


def main(kind: str, folder: str) -> None:
  from launch import _flags, stop
  from launch._processes import joined
  from sao_jax.parallel import process

  signal.signal(signal.SIGINT, stop)  # as in `python -m launch.NAME`
  if kind == "idle":
    process.LEAVE_SECONDS = 2
  with joined(None, _flags._said):
    {"damage": damage, "interrupt": interrupt, "killed": killed, "idle": idle}[kind](folder)


if __name__ == "__main__":
  main(*sys.argv[1:])
