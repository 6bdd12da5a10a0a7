"""Checkpoints of a run: both networks, their optimisers and the host's state, asynchronous and atomic, through Orbax.

A checkpoint is a directory `<step>/` with the items "policy" and "critic" (the parameters, nested dicts by name),
"rest" (optimiser states and counters) and "host" (see host_state.py). It is written under a temporary name and renamed
when complete, so a kill at any moment leaves the last complete checkpoint intact. Nothing is ever pickled.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from sao_jax.checkpoints.elsewhere import ElsewhereHandler, ElsewhereRestore, ElsewhereSave
from sao_jax.checkpoints.host_state import Archives, HostStateHandler, HostStateRestore, HostStateSave, encode
from sao_jax.checkpoints.readable import StateHandler, StateRestore, StateSave, check_readable_items
from sao_jax.checkpoints.retention import Best, retention
from sao_jax.checkpoints.state_tree import NETWORKS, REST, check_same_leaves, flatten, nest, places, split
from sao_jax.configuration.paths import check_readable, check_storable, expand, move
from sao_jax.errors import ConfigError, RunError
from sao_jax.missing_folder import folder_error
from sao_jax.parallel.agreement import all_processes
from sao_jax.parallel.process import DataShare
from sao_jax.types import PyTree

_HOST = "host"
_ABANDONED = "abandoned"
_UNFINISHED = "*.orbax-checkpoint-tmp*"

MAX_FAILURES = 2  # saves that may fail in a row: the first is said and made up for, the second ends the run

# Exceptions of Orbax, TensorStore and host_state on reading a damaged checkpoint.
_UNREADABLE = (OSError, ValueError, KeyError)


class Restored(NamedTuple):
  """A checkpoint that `Checkpointer.restore` has read.

  Attributes:
    step: the step that it was saved at.
    state: the state, with the structure and shardings that were asked for.
    host_state: the host state that was saved with it.
  """

  step: int
  state: PyTree
  host_state: Any


class CheckpointFailure(RunError):
  """Saves that failed in a row: a run that went on would go on without checkpoints."""


class Checkpointer:
  """Saves and restores train states in a directory; a context manager that waits for the last save.

  Its end raises the error of that save, unless something else has failed before.

  The state is a pytree whose leaves are arrays, best a `TrainState` or a `NetworkState`: `load_params` can load the
  parameters under `policy/params`, `critic/params` or `params` (taken for the policy's) without the rest.

  >>> import tempfile
  >>> state = {"params": {"w": jax.numpy.arange(3.0)}}
  >>> with tempfile.TemporaryDirectory() as workdir:
  ...   with Checkpointer(workdir, keep=2, every=100) as checkpointer:
  ...     checkpointer.save(100, state, host_state={"prompts": 7})
  ...     step, restored, host_state = checkpointer.restore(jax.eval_shape(lambda: state))
  ...   params = load_params(workdir)
  >>> step, host_state, restored["params"]["w"].tolist(), params["w"].tolist()
  (100, {'prompts': 7}, [0.0, 1.0, 2.0], [0.0, 1.0, 2.0])
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    *,
    keep: int = 2,
    every: int = 100,
    share: Callable[[Sequence[Any]], Any] | None = None,
    before: Callable[[], None] = lambda: None,
    own: DataShare | None = None,
    elsewhere: bool = False,
    best: Best | None = None,
  ):
    """Opens `directory`, which is made if need be.

    Args:
      directory: the place of all checkpoints of one phase of a run; a leading `~` is a home.
      keep: number of checkpoints that stay, the newest ones.
      every: steps between two checkpoints (see `due`).
      share: makes the host state of this process of those that another number of processes has saved; None refuses
        such a checkpoint.
      own: the share of the host state that this process saves and restores; None: every process has one.
      elsewhere: True in a process that holds no part of the arrays: states are `jax.ShapeDtypeStruct`s there.
      before: called before a checkpoint is written, to store what must be there once it is complete; its error is that
        of the save.
      best: checkpoints that stay although newer ones have come.
    """
    self._directory, self._best = expand(directory), best
    self._keep, self._every, self._share, self._before = keep, every, share, before
    self._processes = all_processes()
    self._own_share = own or DataShare(self._processes.index, self._processes.count)
    self._elsewhere = elsewhere
    self._current: int | None = None  # the step that this process saved or restored last
    self._failure: Exception | None = None  # of the last save
    self._failures = 0  # in a row
    self._owned = False  # nothing on disk is changed before the first save
    self._proven = False  # until a checkpoint of this object has been looked at
    self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    return _manager(self._directory, retention(self._keep, self._best), elsewhere=self._elsewhere)

  def latest_step(self) -> int | None:
    """Returns the step of the newest complete checkpoint; None without one."""
    return self._manager.latest_step()

  def last_good(self) -> str:
    """Returns half a sentence that names the newest complete checkpoint."""
    newest = self.latest_step()
    if newest is None:
      return f"there is no checkpoint in {self._directory}"
    return f"the last good checkpoint is that of step {newest} in {self._directory}"

  def due(self, step: int) -> bool:
    """True if a checkpoint is to be written after `step` steps. Notices that an earlier save failed, see `save`."""
    self._notice_failure(self._manager.check_for_errors)
    return step % self._every == 0

  def save(
    self,
    step: int,
    state: PyTree,
    host_state: Any = None,
    *,
    turn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
  ) -> None:
    """Starts to write the checkpoint of `step` and returns as soon as `state` may be donated.

    The first one is waited for and looked at: a run must not find out at its end that nothing can be read.
    Saving the step that was saved or restored last does nothing. After a return to an older step, checkpoints of this
    step and later ones belong to a future that the run has abandoned: they are moved to the subfolder "abandoned".

    A save that fails, at once or in the background, is logged as an error; the next one makes up for it. With several
    processes it ends the run: the others wait in it for the one that failed, and none can begin another one alone.

    Args:
      step: number of steps that are done.
      state: a pytree of arrays.
      host_state: plain values and numpy arrays that `host_state.encode` takes.
      turn: of several processes, the place of Orbax's barriers, which are programs on all devices, among the programs
        that another thread starts on devices of several processes.

    Raises:
      CheckpointFailure: it failed, and so did the one before, or there are other processes. Later calls try again.
      TypeError: `host_state` cannot be stored.
      ConfigError: the folder's name is such that no checkpoint in it could be read, or the first one cannot be.
    """
    check_storable(self._directory, "--workdir")
    archive = encode(host_state)  # at once: the host may change its state while the checkpoint is written
    self._notice_failure(self._manager.check_for_errors)
    if step == self._current:
      return

    # The one before must be complete; only then is it known to be no failure.
    self._notice_failure(self._manager.wait_until_finished)
    self._failures = 0 if self._failure is None else self._failures
    self._failure, self._current = None, step

    def start() -> None:
      self._before()
      items = {name: self._save_args(leaves) for name, leaves in split(state).items() if leaves}
      items[_HOST] = HostStateSave(archive, self._own_share)
      with turn():
        self._take_over(step)
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    self._notice_failure(start)

    # The first one is read back before anything is built on it.
    if not self._proven:
      self._notice_failure(self._manager.wait_until_finished)
      if self._failure is None:
        self._prove(step)
        self._proven = True

  def wait(self) -> None:
    """Waits until the checkpoint under way is complete. Raises its error if it failed, as often as it is asked."""
    self._notice_failure(self._manager.wait_until_finished)
    self._notice_failure(self._manager.check_for_errors)
    if self._failure is not None:
      raise self._failure

  def restore(self, abstract_state: PyTree, step: int | None = None, *, older: PyTree | None = None) -> Restored | None:
    """Restores `step`, or the newest readable checkpoint; returns None when there is no checkpoint at all.

    Args:
      abstract_state: the state's structure: leaves with shape, dtype and sharding (`jax.ShapeDtypeStruct` or arrays).
        The shardings may differ from those of the saved state.
      step: the step; None takes the newest checkpoint and, if that cannot be read, the one before it.
      older: the structure that an older version saved. A checkpoint like that, and unlike `abstract_state`, is restored
        as it is.

    Raises:
      ConfigError: the checkpoint belongs to another model (the error names the first leaf that differs), or there are
        checkpoints but none can be read.
    """
    self.wait()
    steps = sorted(self._manager.all_steps(), reverse=True) if step is None else [step]
    steps = self._processes.equal("the steps of checkpoints", steps)

    # Newest first; a damaged checkpoint is passed over by all processes, one of another model is an error.
    for candidate in steps:
      if self._processes.any("a checkpoint that cannot be read", not self._looks_readable(candidate)):
        continue
      restored = None
      try:
        restored = self._read(candidate, abstract_state, older)
      except ConfigError:
        raise
      except _UNREADABLE as error:
        logging.error("The checkpoint of step %d in %s cannot be read: %s", candidate, self._directory, error)
      if self._processes.any("a checkpoint that was not read", restored is None):
        continue
      self._current = candidate
      return restored

    # Checkpoints that cannot be read are no reason to start again from nothing.
    if not steps:
      return None
    raise ConfigError(
      "checkpoint",
      f"none of the checkpoints in {self._directory} can be read (steps {', '.join(map(str, steps))}).",
      "Name another step, or start again in a new --workdir; the log above says what is wrong with each.",
    )

  def close(self) -> None:
    """Waits for the save under way and ends the threads."""
    self._manager.close()

  def __enter__(self) -> Checkpointer:
    return self

  def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
    # A save that failed is nothing to leave with in silence; but what failed first leaves as itself.
    try:
      self.wait()
    except Exception:
      if kind is None:
        raise
    finally:
      self.close()

  def _looks_readable(self, step: int) -> bool:
    """Looks at what one process may miss while others read, which they do together; one process alone just reads."""
    try:
      if self._processes.count > 1:
        _stored_leaves(self._manager, step)
    except _UNREADABLE as error:
      logging.error("The checkpoint of step %d in %s cannot be read: %s", step, self._directory, error)
      return False
    return True

  def _save_args(self, leaves: dict[str, Any]) -> ocp.args.CheckpointArgs:
    """Returns what Orbax is to save of an item: nothing in a process that holds no part of it."""
    if self._elsewhere:
      return ElsewhereSave()
    # Orbax takes an array of one of several processes for a mistake, unless that is one of numpy, of the first process.
    local = lambda leaf: np.array(leaf) if self._processes.count > 1 and leaf.is_fully_addressable else leaf
    return StateSave(nest({name: local(leaf) for name, leaf in leaves.items()}))

  def _own(self, host_state: Any, where: str) -> Any:
    """Takes this process's share of a host state that was saved in other shares."""
    if not isinstance(host_state, Archives):
      return host_state
    saved, now = len(host_state.states), self._own_share.count
    if self._share is None:
      raise ConfigError(
        "--num_processes", f"{where} was saved by {saved} processes, and these are {now}.", f"Start {saved} processes."
      )
    logging.info("%s was saved by %d processes: what they held is divided over %d.", where, saved, now)
    return self._share(host_state.states)

  def _read(self, step: int, abstract_state: PyTree, older: PyTree | None = None) -> Restored:
    where = f"{self._directory}, step {step}"
    stored = _stored_leaves(self._manager, step)
    wanted = split(abstract_state)
    try:
      for name, leaves in wanted.items():
        check_same_leaves(stored.get(name, {}), leaves, name, where)
    except ConfigError as error:
      if older is None:
        raise
      with contextlib.suppress(ConfigError):
        return self._read(step, older)
      raise error

    arguments = lambda leaves: ElsewhereRestore() if self._elsewhere else _restore_args(leaves)
    items = {name: arguments(leaves) for name, leaves in wanted.items() if leaves}
    host = HostStateRestore(self._own_share)
    with self._processes.busy():
      restored = self._manager.restore(step, args=ocp.args.Composite(**items, **{_HOST: host}))
    check_readable_items(restored)
    own = self._own(restored[_HOST], where)
    if self._elsewhere:
      return Restored(step, abstract_state, own)
    flat = {name: flatten(restored[name]) for name in items}
    leaves = [flat[item][name] for item, name in places(abstract_state)]
    return Restored(step, jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), own)

  def _notice_failure(self, action: Callable[[], None]) -> None:
    """Does `action`. An error in it is that of the last save: it is logged, and too many in a row are raised."""
    try:
      with self._processes.busy():
        action()
    except RunError:  # this process must not write at all
      raise
    except Exception as error:
      failed, self._current = self._current, None
      self._failure, self._failures = error, self._failures + 1
      alone = self._processes.count == 1

      # The old manager takes the step for saved, and its writers may still be at work: the next save has a new one,
      # which all processes would have to make together.
      if alone:
        self._manager, self._owned = self._open(), False
      logging.error("The checkpoint of step %s was not written: %r; %s.", failed, error, self.last_good())
      if self._failures >= MAX_FAILURES or not alone:
        number = f"{self._failures} checkpoints in a row" if self._failures > 1 else "A checkpoint"
        raise CheckpointFailure(
          f"{number} could not be written, the last one for step {failed} ({error}); "
          f"{self.last_good()}. Make room or mend the disk: the same command goes on from there."
        ) from error

  def _prove(self, step: int) -> None:
    """Raises ConfigError if the checkpoint of `step`, which is complete, cannot be found again."""
    try:
      _stored_leaves(self._manager, step)
    except _UNREADABLE as error:
      self._current = None
      raise ConfigError(
        "--workdir",
        f"the checkpoint of step {step} was written to {self._directory} and cannot be read again: {error}",
        "Use a --workdir on another file system, or with a plainer name.",
      ) from error

  def _take_over(self, step: int) -> None:
    """Makes room for a save: removes leftovers of killed and failed saves, and moves an abandoned future aside."""
    abandoned = [later for later in self._manager.all_steps() if later >= step]
    if self._processes.is_writer:
      if not self._owned:
        for path in self._directory.glob(_UNFINISHED):
          shutil.rmtree(path, ignore_errors=True)
      for later in abandoned:
        target = _free_name(self._directory / _ABANDONED / str(later))
        move(self._directory / str(later), target)
        logging.warning("The checkpoint of step %d was moved to %s: this run goes on before it.", later, target)
    self._owned = not any(self._directory.glob(_UNFINISHED))  # a writer of a failed save may be at work even now
    if abandoned:
      ocp.multihost.sync_global_processes("sao_jax:abandoned_checkpoints")
      self._manager.reload()


def load_params(
  directory: str | os.PathLike,
  which: str = "policy",
  abstract: PyTree | None = None,
  *,
  step: int | None = None,
  optional: str | None = None,
  shardings: Callable[[str], jax.sharding.Sharding] | None = None,
) -> PyTree:
  """Loads one network's parameters from a checkpoint directory, as a start for another run (`model.checkpoint`).

  Args:
    directory: the directory of a `Checkpointer`.
    which: "policy" or "critic".
    abstract: shapes, dtypes and shardings of the parameters; by default those stored, on the first device. A process
      without any device of the shardings gets it back.
    step: the step of the checkpoint; by default the newest.
    optional: a name at the top of `abstract` that may be absent from the checkpoint, and then is from the result.
    shardings: of each parameter by its name, where there is no `abstract`; None puts all on the first device.

  Raises:
    ConfigError: there is no such checkpoint or network, or it is of another model.
  """
  directory = expand(directory)
  check_readable(directory, "model.checkpoint")
  problem = "holds no checkpoint"

  # A damaged checkpoint is reported like a missing one; one of another model has an error of its own.
  if directory.is_dir():
    with _manager(directory, create=False, elsewhere=_is_elsewhere(abstract)) as manager:
      steps = [found for found in manager.all_steps() if step in (None, found)]
      try:
        if steps:
          where = f"{directory}, step {max(steps)}"
          return _read_network(manager, max(steps), which, abstract, where, optional, shardings)
      except ConfigError:
        raise
      except _UNREADABLE as error:
        problem = f"cannot be read at step {max(steps)} ({error})"

  # No directory, no checkpoint (of this step), or a damaged one.
  wanted = "" if step is None else f" of step {step}"
  remedy = "Name the directory that a run saved into; it has one folder per step."
  raise folder_error("model.checkpoint", directory, f"{directory} {problem}{wanted}.", remedy)


def load_host_state(directory: str | os.PathLike, step: int) -> Any:
  """Loads the host state that was saved with the checkpoint of `step`; that of process 0 if there were more or fewer.

  Raises:
    FileNotFoundError, ValueError: it cannot be read.
  """
  with _manager(expand(directory), create=False) as manager:
    state = manager.restore(step, args=ocp.args.Composite(**{_HOST: HostStateRestore()}))[_HOST]
    check_readable_items({_HOST: state})
    return state.states[0] if isinstance(state, Archives) else state


def _read_network(
  manager: ocp.CheckpointManager,
  step: int,
  which: str,
  abstract: PyTree | None,
  where: str,
  optional: str | None = None,
  shardings: Callable[[str], jax.sharding.Sharding] | None = None,
) -> PyTree:
  stored = _stored_leaves(manager, step).get(which)
  if stored is None:
    raise ConfigError("model.checkpoint", f"there is no {which} in {where}.", "Name a run that trained one.")
  if optional and abstract is not None and not any(name.startswith(f"{optional}/") for name in stored):
    abstract = {name: tree for name, tree in abstract.items() if name != optional}
  if shardings is not None:
    stored = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings(name)) for name, x in stored.items()}
  leaves = stored if abstract is None else flatten(abstract)
  check_same_leaves(stored, leaves, which, where, same_dtype=False)
  arguments = ElsewhereRestore() if _is_elsewhere(abstract) else _restore_args(leaves)
  with all_processes().busy():
    restored = manager.restore(step, args=ocp.args.Composite(**{which: arguments}))[which]
  check_readable_items({which: restored})
  if abstract is None:
    return restored
  if _is_elsewhere(abstract):
    return abstract
  flat = flatten(restored)
  return jax.tree.unflatten(jax.tree.structure(abstract), [flat[name] for name in leaves])


def _is_elsewhere(abstract: PyTree | None) -> bool:
  """Tells if no part of the arrays is to be on a device of this process."""
  shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(abstract)]
  return bool(shardings) and all(each is not None and not each.addressable_devices for each in shardings)


def _manager(
  directory: pathlib.Path, kept: Any = None, *, create: bool = True, elsewhere: bool = False
) -> ocp.CheckpointManager:
  options = ocp.CheckpointManagerOptions(preservation_policy=kept, create=create)
  handler = ElsewhereHandler if elsewhere else StateHandler
  handlers = {name: handler() for name in (*NETWORKS, REST)}
  return ocp.CheckpointManager(directory, options=options, item_handlers=handlers | {_HOST: HostStateHandler()})


def _stored_leaves(manager: ocp.CheckpointManager, step: int) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
  """Reads shapes and dtypes of the checkpoint of `step`, by item and name. FileNotFoundError when a part is lost."""
  metadata = manager.metadata(step)
  saved = [name for name in (*NETWORKS, REST) if name in (metadata.item_handlers or {})]
  found = {name: metadata.item_metadata[name] for name in saved}
  lost = [name for name, item in found.items() if item is None]
  if lost or not saved:
    raise FileNotFoundError(f"the checkpoint is incomplete: {', '.join(lost) or 'the list of its items'} is missing")
  return {
    name: {leaf: jax.ShapeDtypeStruct(x.shape, x.dtype) for leaf, x in flatten(item.tree).items()}
    for name, item in found.items()
  }


def _restore_args(leaves: dict[str, Any]) -> Any:
  default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  targets = {
    name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or default)
    for name, leaf in leaves.items()
  }
  return StateRestore(nest(targets))


def _free_name(path: pathlib.Path) -> pathlib.Path:
  names = (path.with_name(f"{path.name}{suffix}") for suffix in ("", *(f".{i}" for i in range(1, 10_000))))
  return next(name for name in names if not name.exists())
