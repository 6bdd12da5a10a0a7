"""Agreement of the processes of a run, through the key-value store of jax's coordination service.

Every process must leave the loop at the same step, choose the same shapes and save the same step, or the others wait in
a collective for ever. They agree on the host, at no cost of device time: a decision is a small JSON value of each
process, which all of them get. On one process it costs nothing.

* Decisions are numbered, and have names: processes that decide different things at the same time are told so.
* A process that waits for others looks for those that have failed, and says why they did. One that shows no sign of
  life for a long time is an error; one that is dead is found by who watches over all, or by jax, which ends the others.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

from sao_jax.background import beside
from sao_jax.errors import EXIT_BAD_INPUT, EXIT_FAILURE, ConfigError, ProcessFailed, RunError
from sao_jax.interrupt import StopSignal
from sao_jax.parallel.process import own_address

SECONDS = 900.0  # without a sign of life of a process that others wait for
RESCUE_SECONDS = 20.0  # to agree on what is saved when something has failed
SLICE = 0.5  # seconds between two looks while waiting
SIGN = 10.0  # seconds between two signs of life, at most

_ROOT = "sao_jax"


class Store(Protocol):
  """The part of jax's coordination client that is used here, which jax has no public name for."""

  def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
  def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...
  def key_value_dir_get(self, key: str) -> Sequence[tuple[str, str]]: ...
  def key_value_delete(self, key: str) -> None: ...


class Disagreement(RunError):
  """Processes that decided different things, where all must decide the same."""


class Processes:
  """All processes of a run, seen from one of them. Decisions belong to one thread; signals to any.

  Attributes:
    index: this process.
    count: all of them.
    noticed: True once this process knows that one has failed, itself or another.
    host: the address at which the others reach this process's host.
  """

  def __init__(
    self,
    index: int = 0,
    count: int = 1,
    store: Store | None = None,
    *,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
    host: str = "127.0.0.1",
  ):
    """Args:
    index: this process.
    count: all of them.
    store: what they share; None for one process.
    seconds: without a sign of life, after which a process that is waited for is given up.
    clock: seconds.
    host: the address at which the others reach this process's host.
    """
    self.index, self.count, self.host = index, count, host
    self._store, self._seconds, self._clock = store, seconds, clock
    self._number = 0  # of the decision that was made last
    self._looked = self._signed = -float("inf")
    self._stop = self.noticed = False

  @property
  def is_writer(self) -> bool:
    """Is this the process that writes what there is one of?"""
    return self.index == 0

  # Decisions: all processes make the same ones, in the same order.

  def gather(self, name: str, value: Any, look: Callable[[], object] = lambda: None) -> list[Any]:
    """Returns the values of all processes, in order, to all of them. Values are JSON, of a few kilobytes at most.

    `look` is called now and then while others are waited for; it may raise.

    Raises:
      Disagreement: another process decides something else.
      ProcessFailed: another process has failed, or shows no sign of life.
    """
    if self.count == 1:
      return [value]
    self._number += 1
    here = f"{_ROOT}/{self._number}"
    wait = functools.partial(self._wait, look=look)
    entries = self._exchange(here, {"name": name, "value": value}, wait)
    names = [entry["name"] for entry in entries]
    if len(set(names)) > 1:
      listed = ", ".join(f"process {index} on {each!r}" for index, each in enumerate(names))
      raise Disagreement(f"The processes decide on different things (decision {self._number}): {listed}.")

    # Whoever has these values has read those of the decision before.
    if self.index == 0:
      self._store.key_value_delete(f"{_ROOT}/{self._number - 1}/")
    return [entry["value"] for entry in entries]

  def any(self, name: str, value: bool, look: Callable[[], object] = lambda: None) -> bool:
    """True for all if it is true for one; `look` as for `gather`."""
    return any(self.gather(name, bool(value), look))

  def max(self, name: str, value: float) -> float:
    """The largest value of all."""
    return max(self.gather(name, value))

  def first(self, name: str, value: Any) -> Any:
    """The value of process 0, as JSON brings it back where there are others."""
    return self.gather(name, value if self.is_writer else None)[0]

  def equal(self, name: str, value: Any) -> Any:
    """The value, which must be the same everywhere.

    Raises:
      Disagreement: it is not.
    """
    values = self.gather(name, value)
    if any(each != values[0] for each in values):
      listed = ", ".join(f"{each!r} on process {index}" for index, each in enumerate(values))
      raise Disagreement(f"The processes differ in {name}: {listed}.")
    return value

  def to_writer(self, name: str, value: Any) -> list[Any] | None:
    """Returns the values of all processes to the one that writes; the others get None, and go on at once."""
    if self.count == 1:
      return [value]
    self._number += 1
    here, entry = f"{_ROOT}/{self._number}", {"name": name, "value": value}
    if not self.is_writer:
      self._store.key_value_set(f"{here}/{self.index}", json.dumps(entry))
      return None
    entries = [entry] + [json.loads(self._wait(f"{here}/{other}", other)) for other in range(1, self.count)]
    for done in (self._number - 1, self._number):  # whoever has sent this has read the one before
      self._store.key_value_delete(f"{_ROOT}/{done}/")
    if any(each["name"] != name for each in entries):
      raise Disagreement(f"Process {self.index} collects {name!r}, the others send {[e['name'] for e in entries]}.")
    return [each["value"] for each in entries]

  # Entries of one process, which some others read.

  def post(self, name: str, value: Any) -> None:
    """Leaves a value, JSON, which others `collect` until it is removed; a name is a path of its own."""
    self._store.key_value_set(f"{_ROOT}/posted/{name}", json.dumps(value), allow_overwrite=True)

  def collect(self, name: str, poster: int) -> Any:
    """Waits for what process `poster` posts.

    Raises:
      ProcessFailed: another process has failed, or the one waited for shows no sign of life.
    """
    return json.loads(self._wait(f"{_ROOT}/posted/{name}", poster))

  def remove(self, name: str) -> None:
    """Takes back what was posted."""
    self._store.key_value_delete(f"{_ROOT}/posted/{name}")

  def look(self) -> None:
    """Shows that this process lives, and looks if the others do; who waits in a way of its own does so now and then.

    Raises:
      ProcessFailed: another process has failed.
    """
    self._sign()
    failure = self.failure()
    if failure is not None and failure.process != self.index:
      self.noticed = True
      raise failure

  # Signals: no process waits for another.

  def request_stop(self) -> None:
    """Asks all processes to stop at the next step that they agree on."""
    if self.count > 1 and not self._stop:
      self._stop = True
      self._store.key_value_set(f"{_ROOT}/stop/{self.index}", "", allow_overwrite=True)

  @property
  def stop_requested(self) -> bool:
    """Has a process asked all to stop, or failed, as the next decision tells?

    The look, which long waits take now and then, is a sign of life as well.
    """
    now = self._clock()
    if self.count == 1 or self._stop or now - self._looked < SLICE:
      return self._stop
    self._looked = now
    self._sign()
    self._stop = bool(self._store.key_value_dir_get(f"{_ROOT}/stop/")) or self.failure() is not None
    return self._stop

  def fail(self, error: BaseException | str, status: int | None = None) -> None:
    """Tells the others that this process cannot go on, and why: those that wait for it raise `ProcessFailed`.

    The first failure is that of all. `status` is the exit status that it has; None: as a program ends by such an error.
    """
    if self.count > 1:
      self.noticed = True
      if status is None:
        status = EXIT_BAD_INPUT if isinstance(error, ConfigError) else EXIT_FAILURE
      self._fail(self.index, error if isinstance(error, str) else f"{type(error).__name__}: {error}", status)

  def lose(self, other: int) -> None:
    """Tells all that another process has died."""
    self._fail(other, "it has died without a word", EXIT_FAILURE)
    self._go(other)

  def failure(self) -> ProcessFailed | None:
    """Returns the first failure of all, that of this process too; None as long as there is none."""
    for _, text in self._store.key_value_dir_get(f"{_ROOT}/failure/") if self.count > 1 else ():
      entry = json.loads(text)
      message = f"Process {entry['process']} has failed ({entry['text']})."
      return ProcessFailed(message, entry["process"], entry["status"])
    return None

  def go(self) -> None:
    """Says that this process takes part in nothing any more: it has failed, and ends."""
    if self.count > 1:
      self._go(self.index)

  def gone(self) -> set[int]:
    """The other processes that have said so."""
    return self._entries("gone").keys() - {self.index} if self.count > 1 else set()

  @contextlib.contextmanager
  def busy(self) -> Iterator[None]:
    """Gives signs of life while this process does what may take long and looks at nothing: it reads, saves, compiles.

    Elsewhere silence means that something hangs.
    """
    if self.count == 1:
      yield
      return

    def sign(ended: threading.Event) -> None:
      with contextlib.suppress(jax.errors.JaxRuntimeError):  # the store is gone, which the next decision finds out
        self._sign()
        while not ended.wait(SIGN):
          self._sign()

    with beside(sign, "signs of life"):
      yield

  def agree_after_failure(self, value: Any) -> bool:
    """Tells whether all come here with the same value, soon after one of them has failed. Once in a run."""
    if self.count == 1:
      return True
    deadline = self._clock() + RESCUE_SECONDS

    def wait(key: str, other: int) -> str:
      left = max(deadline - self._clock(), 0.1)
      return self._store.blocking_key_value_get(key, int(1000 * left))

    try:
      values = self._exchange(f"{_ROOT}/rescue", value, wait)
    except jax.errors.JaxRuntimeError:
      # Who comes later must not count on this process, and begin to save alone.
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        self._store.key_value_delete(f"{_ROOT}/rescue/{self.index}")
      return False
    return all(each == value for each in values)

  # The exchange: process 0 collects, and hands out, so that the messages are twice the processes.

  def _exchange(self, here: str, value: Any, wait: Callable[[str, int], str]) -> list[Any]:
    """Returns the values of all, which lie under the folder `here`; `wait(key, process)` gets one entry."""
    if self.index:
      self._store.key_value_set(f"{here}/{self.index}", json.dumps(value))
      return json.loads(wait(f"{here}/all", 0))
    values = [value] + [json.loads(wait(f"{here}/{other}", other)) for other in range(1, self.count)]
    self._store.key_value_set(f"{here}/all", json.dumps(values))
    return json.loads(json.dumps(values))

  def _wait(self, key: str, other: int, look: Callable[[], object] = lambda: None) -> str:
    """Waits for an entry that process `other` makes, and calls `look` now and then."""
    seen, sign = self._clock(), None
    while True:
      try:
        return self._store.blocking_key_value_get(key, int(1000 * SLICE))
      except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
          raise ProcessFailed(f"The store of all processes is gone; process 0 may have ended ({error}).") from error

      # Whoever waits shows that it lives, and looks if the others do.
      look()
      self.look()
      latest = self._entries("alive").get(other)
      if latest != sign:
        seen, sign = self._clock(), latest
      elif self._clock() - seen > self._seconds:
        raise ProcessFailed(
          f"Process {other} has shown no sign of life for {self._seconds:.0f} s, and process {self.index} waits for it "
          f"(decision {self._number}). Its own log may say what it does; the same command goes on from the newest "
          "checkpoint.",
          other,
        )

  def _entries(self, folder: str) -> dict[int, str]:
    """The signals of one kind, by process."""
    entries = self._store.key_value_dir_get(f"{_ROOT}/{folder}/")
    return {int(key.rpartition("/")[2]): text for key, text in entries}

  def _fail(self, index: int, text: str, status: int) -> None:
    entry = {"process": index, "text": text[:2000], "status": status}
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was first, or the store is gone
      self._store.key_value_set(f"{_ROOT}/failure/first", json.dumps(entry))

  def _go(self, index: int) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._store.key_value_set(f"{_ROOT}/gone/{index}", "", allow_overwrite=True)

  def _sign(self) -> None:
    """Shows that this process lives, now and then."""
    now = self._clock()
    if now - self._signed >= SIGN / 2:
      self._signed = now
      self._store.key_value_set(f"{_ROOT}/alive/{self.index}", str(now), allow_overwrite=True)


ALONE = Processes()


def shared_stop(own: StopSignal, processes: Processes) -> StopSignal:
  """Returns the stop signal of all processes, made of that of this one: the same where it is alone."""
  return own if processes.count == 1 else SharedStop(own, processes)


class SharedStop:
  """The stop signal of all processes: that of one is that of all."""

  def __init__(self, own: StopSignal, processes: Processes):
    self._own, self._processes = own, processes

  @property
  def requested(self) -> bool:
    """True once any process was asked to stop."""
    if self._own.requested:
      self._processes.request_stop()
      return True
    return self._processes.stop_requested


def all_processes() -> Processes:
  """Returns the processes of this run, as `initialize_processes` has joined them: always the same object.

  It does not ask for devices where there is one process: a program that only looks at a run must not take a TPU.
  """
  return _joined() if jax.distributed.is_initialized() else ALONE


@functools.cache
def _joined() -> Processes:
  from jax._src import distributed  # there is no public name for the client

  service = distributed.global_state
  host = own_address(service.coordinator_address.rpartition(":")[0])
  return Processes(jax.process_index(), jax.process_count(), service.client, host=host)
