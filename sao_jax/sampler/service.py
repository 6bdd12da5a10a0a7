"""The sampler as a service: threads tick, any number of threads and event loops wait for completions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import threading
from collections.abc import Sequence

from sao_jax.parallel.params import Params
from sao_jax.sampler.requests import Completion, GenerateRequest, ServiceStoppedError
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.session import OnDone


class SamplerService:
  """Owns a thread per scheduler between `start` and `stop`; also a context manager.

  Usually there is one scheduler. Several, each with its own engine, use several devices, or all cores of a CPU; a
  session stays with the scheduler that had the fewest running turns when it began.

  What ends a thread ends them all: every waiting and every later caller gets that exception.
  """

  def __init__(self, *schedulers: Scheduler):
    self._lanes = [_Lane(scheduler, self._run) for scheduler in schedulers]
    self._homes: dict[int, _Lane] = {}  # of sessions that are kept for another turn
    self._sessions = itertools.count()
    self._lock = threading.Lock()
    self._ended: BaseException | None = None

  def start(self) -> SamplerService:
    """Starts the threads."""
    for lane in self._lanes:
      lane.thread.start()
    return self

  def stop(self) -> None:
    """Ends the threads; turns that still run end with `ServiceStoppedError`."""
    self._end(ServiceStoppedError("the sampler was stopped"))
    for lane in self._lanes:
      if lane.thread.is_alive():
        lane.thread.join()

  def __enter__(self) -> SamplerService:
    return self.start()

  def __exit__(self, *unused) -> None:
    self.stop()

  @property
  def error(self) -> BaseException | None:
    """The fault that ended the sampler; None while all is well, and after `stop`."""
    return None if isinstance(self._ended, ServiceStoppedError) else self._ended

  @property
  def version(self) -> int:
    """Policy version of the next dispatch; with several schedulers the oldest one."""
    return min(lane.scheduler.version for lane in self._lanes)

  def new_session(self) -> int:
    """A session id that nobody else has."""
    return next(self._sessions)

  def submit(self, request: GenerateRequest) -> concurrent.futures.Future[Completion]:
    """Queues a turn; see `generate` for what the future may raise.

    Raises:
      BaseException: whatever ended the sampler.
    """
    return self.submit_all([request])[0]

  def submit_all(self, requests: Sequence[GenerateRequest]) -> list[concurrent.futures.Future[Completion]]:
    """Queues several turns as one: a scheduler sees all of its share, in this order, before it looks at any.

    Raises:
      BaseException: whatever ended the sampler.
    """
    futures: list[concurrent.futures.Future[Completion]] = [concurrent.futures.Future() for _ in requests]
    shares: dict[_Lane, list[tuple[GenerateRequest, OnDone]]] = {}
    with self._lock:  # no request may slip in behind the failure of all the others
      if self._ended is not None:
        raise self._ended
      for request, future in zip(requests, futures):
        lane = self._homes.get(request.session_id) or min(self._lanes, key=lambda lane: lane.running)
        if request.keep_slot:
          self._homes[request.session_id] = lane
        else:
          self._homes.pop(request.session_id, None)
        lane.running += 1
        shares.setdefault(lane, []).append((request, functools.partial(self._answer, lane, future)))
      for lane, share in shares.items():
        lane.scheduler.submit_all(share)
    for lane in shares:
      lane.wake.set()
    return futures

  def _answer(
    self, lane: _Lane, future: concurrent.futures.Future[Completion], result: Completion | BaseException
  ) -> None:
    with self._lock:
      lane.running -= 1
    if not future.set_running_or_notify_cancel():
      return  # the caller has gone
    if isinstance(result, BaseException):
      future.set_exception(result)
    else:
      future.set_result(result)

  async def generate(self, request: GenerateRequest) -> Completion:
    """Samples one turn; a cancelled caller releases its session.

    Raises:
      ConfigError: a request that cannot be served.
      SessionReleasedError: `release` was called in the meantime.
      BaseException: whatever ended the sampler.
    """
    try:
      return await asyncio.wrap_future(self.submit(request))
    except asyncio.CancelledError:
      self.release(request.session_id)
      raise

  def generate_sync(self, request: GenerateRequest, timeout: float | None = None) -> Completion:
    """`generate` for a caller without an event loop; `timeout` in seconds."""
    return self.submit(request).result(timeout)

  def release(self, session_id: int) -> None:
    """Forgets a session that was kept for another turn."""
    with self._lock:
      home = self._homes.pop(session_id, None)
    for lane in [home] if home else self._lanes:
      lane.scheduler.release(session_id)
      lane.wake.set()

  def publish(self, params: Params, version: int) -> None:
    """New parameters from the next dispatch on; returns at once.

    Raises:
      ConfigError: parameters of another model.
      BaseException: whatever ended the sampler.
    """
    if self._ended is not None:
      raise self._ended
    for lane in self._lanes:
      lane.scheduler.publish(params, version)
      lane.wake.set()

  def stats(self) -> dict[str, int]:
    """See `Scheduler.stats`; sums over the schedulers, and the oldest version."""
    stats = [lane.scheduler.stats() for lane in self._lanes]
    return {name: sum(each[name] for each in stats) for name in stats[0]} | {"version": self.version}

  def _run(self, lane: _Lane) -> None:
    try:
      while True:
        lane.wake.clear()  # before the look at `_ended`: what wakes the lane after that look is not lost
        if self._ended is not None:
          break
        if not lane.scheduler.tick():
          lane.wake.wait()
    except BaseException as error:  # whatever it is, it must reach the callers
      self._end(error)
    lane.scheduler.fail(self._ended)

  def _end(self, error: BaseException) -> None:
    """Makes all threads leave; the first error is the one that counts."""
    with self._lock:
      self._ended = self._ended or error
    for lane in self._lanes:
      lane.wake.set()


class _Lane:
  """A scheduler, the thread that ticks it, and the number of turns it has."""

  def __init__(self, scheduler: Scheduler, run):
    self.scheduler, self.running = scheduler, 0
    self.wake = threading.Event()
    self.thread = threading.Thread(target=run, args=(self,), name="sampler", daemon=True)
