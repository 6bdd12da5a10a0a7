"""The sampler as a service: one thread ticks, any number of threads and event loops wait for completions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading

from sao_jax.parallel.params import Params
from sao_jax.sampler.requests import Completion, GenerateRequest, ServiceStoppedError
from sao_jax.sampler.scheduler import Scheduler


class SamplerService:
  """Owns the scheduler's thread between `start` and `stop`; also a context manager.

  Attributes:
    error: what ended the thread, None while all is well. Every waiting and every later caller gets it.
  """

  def __init__(self, scheduler: Scheduler):
    self._scheduler = scheduler
    self._sessions = itertools.count()
    self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
    self._wake = threading.Event()
    self._lock = threading.Lock()
    self._stopping = False
    self.error: BaseException | None = None

  def start(self) -> SamplerService:
    """Starts the thread."""
    self._thread.start()
    return self

  def stop(self) -> None:
    """Ends the thread; turns that still run end with `ServiceStoppedError`."""
    self._stopping = True
    self._wake.set()
    if self._thread.is_alive():
      self._thread.join()

  def __enter__(self) -> SamplerService:
    return self.start()

  def __exit__(self, *unused) -> None:
    self.stop()

  @property
  def version(self) -> int:
    """Policy version of the next dispatch."""
    return self._scheduler.version

  def new_session(self) -> int:
    """A session id that nobody else has."""
    return next(self._sessions)

  async def generate(self, request: GenerateRequest) -> Completion:
    """Samples one turn; a cancelled caller releases its session.

    Raises:
      ConfigError: a request that cannot be served.
      BaseException: whatever ended the sampler's thread.
    """
    try:
      return await asyncio.wrap_future(self._submit(request))
    except asyncio.CancelledError:
      self.release(request.session_id)
      raise

  def generate_sync(self, request: GenerateRequest, timeout: float | None = None) -> Completion:
    """`generate` for a caller without an event loop; `timeout` in seconds."""
    return self._submit(request).result(timeout)

  def release(self, session_id: int) -> None:
    """Forgets a session that was kept for another turn."""
    self._scheduler.release(session_id)
    self._wake.set()

  def publish(self, params: Params, version: int) -> None:
    """New parameters from the next dispatch on; returns at once.

    Raises:
      ConfigError: parameters of another model.
      BaseException: whatever ended the sampler's thread.
    """
    if self.error is not None:
      raise self.error
    self._scheduler.publish(params, version)
    self._wake.set()

  def stats(self) -> dict[str, int]:
    """See `Scheduler.stats`."""
    return self._scheduler.stats()

  def _submit(self, request: GenerateRequest) -> concurrent.futures.Future[Completion]:
    future: concurrent.futures.Future[Completion] = concurrent.futures.Future()

    def on_done(result: Completion | BaseException) -> None:
      if not future.set_running_or_notify_cancel():
        return  # the caller has gone
      if isinstance(result, BaseException):
        future.set_exception(result)
      else:
        future.set_result(result)

    with self._lock:  # no request may slip in behind the failure of all the others
      if self.error is not None:
        raise self.error
      self._scheduler.submit(request, on_done)
    self._wake.set()
    return future

  def _run(self) -> None:
    error: BaseException = ServiceStoppedError("the sampler was stopped")
    try:
      while not self._stopping:
        self._wake.clear()
        if not self._scheduler.tick():
          self._wake.wait()
    except BaseException as caught:  # noqa: BLE001 it must reach the callers, whatever it is
      error = caught
    with self._lock:
      self.error = error
    self._scheduler.fail(error)
