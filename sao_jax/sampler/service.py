"""The sampler as a service: its threads tick, while any number of threads and event loops wait for completions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence

from sao_jax.parallel.params import Params
from sao_jax.sampler.requests import Completion, GenerateRequest, ServiceStoppedError
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.session import OnDone


class SamplerService:
  """Owns a thread per scheduler between `start` and `stop`; also a context manager.

  Usually there is one scheduler. Several, each with its own engine, use several devices, or all cores of a CPU; a
  session stays with the scheduler that had the fewest running turns when it began.

  An exception in one thread ends them all: every waiting and every later caller gets that exception.

  >>> import jax
  >>> from sao_jax.config import ModelConfig, SamplerConfig
  >>> from sao_jax.models.transformer import param_specs
  >>> from sao_jax.parallel.params import init_params
  >>> from sao_jax.sampler.engine import Engine
  >>> model = ModelConfig(vocab_size=8, num_layers=1, d_model=4, num_heads=1, num_kv_heads=1, head_dim=4, d_ff=4)
  >>> config = SamplerConfig(num_slots=2, context_length=16, decode_steps=4, prefill_buckets=(16,))
  >>> engine = Engine(init_params(param_specs(model), jax.random.key(0)), model, config, seed=0)
  >>> with SamplerService(Scheduler(engine)) as service:
  ...   request = GenerateRequest(service.new_session(), rollout_id=0, new_token_ids=(1, 2), max_tokens=3)
  ...   completion = asyncio.run(service.generate(request))
  >>> completion.finish_reason, completion.token_ids.shape, completion.policy_versions.tolist()
  ('length', (3,), [0, 0, 0])
  """

  def __init__(self, *schedulers: Scheduler):
    """Takes over the schedulers; nobody else may tick them."""
    self._lanes = [_Lane(scheduler, self._run) for scheduler in schedulers]
    self._homes: dict[int, _Lane] = {}  # by id, the sessions that are kept for another turn
    self._sessions = itertools.count()
    self._lock = threading.Lock()
    self._ended: BaseException | None = None

  def start(self) -> SamplerService:
    """Starts the threads and returns the service itself."""
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

  def __exit__(self, *exception: object) -> None:
    self.stop()

  @property
  def error(self) -> BaseException | None:
    """The fault that ended the sampler; None while it runs, and after `stop`."""
    return None if isinstance(self._ended, ServiceStoppedError) else self._ended

  @property
  def progress(self) -> float:
    """A number that goes on changing as long as the sampler does something: tokens, weights, programs that compile."""
    if any(lane.scheduler.compiling for lane in self._lanes):
      return time.monotonic()
    return sum(lane.scheduler.progress for lane in self._lanes)

  @property
  def version(self) -> int:
    """Policy version of the next dispatch; the oldest one among several schedulers."""
    return min(lane.scheduler.version for lane in self._lanes)

  def new_session(self) -> int:
    """Returns a session id that was not given out before."""
    return next(self._sessions)

  def submit(self, request: GenerateRequest) -> concurrent.futures.Future[Completion]:
    """Queues a turn; the future raises the errors that `generate` lists.

    Raises:
      BaseException: the exception that ended the sampler.
    """
    return self.submit_all([request])[0]

  def submit_all(self, requests: Sequence[GenerateRequest]) -> list[concurrent.futures.Future[Completion]]:
    """Queues several turns as one: a scheduler sees all of its share, in this order, before it starts any.

    Raises:
      BaseException: the exception that ended the sampler.
    """
    futures: list[concurrent.futures.Future[Completion]] = [concurrent.futures.Future() for _ in requests]
    shares: dict[_Lane, list[tuple[GenerateRequest, OnDone]]] = {}

    # Under the lock, so that no request slips in after the sampler's end has failed all the others.
    with self._lock:
      if self._ended is not None:
        raise self._ended

      # A session stays with its scheduler; a new one goes to the least busy.
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
      return  # the caller has cancelled it
    if isinstance(result, BaseException):
      future.set_exception(result)
    else:
      future.set_result(result)

  async def generate(self, request: GenerateRequest) -> Completion:
    """Samples one turn; if the caller is cancelled, its session is released.

    Raises:
      ConfigError: the request cannot be served.
      SessionReleasedError: `release` was called in the meantime.
      BaseException: the exception that ended the sampler.
    """
    try:
      return await asyncio.wrap_future(self.submit(request))
    except asyncio.CancelledError:
      self.release(request.session_id)
      raise

  def generate_sync(self, request: GenerateRequest, timeout: float | None = None) -> Completion:
    """Samples one turn for a caller without an event loop; `timeout` in seconds, errors as for `generate`."""
    return self.submit(request).result(timeout)

  def release(self, session_id: int) -> None:
    """Forgets a session that was kept for another turn."""
    with self._lock:
      home = self._homes.pop(session_id, None)
    for lane in [home] if home else self._lanes:
      lane.scheduler.release(session_id)
      lane.wake.set()

  def publish(self, params: Params, version: int) -> None:
    """Hands new parameters to the next dispatch; returns at once.

    Raises:
      ConfigError: the parameters are of another model.
      BaseException: the exception that ended the sampler.
    """
    if self._ended is not None:
      raise self._ended
    for lane in self._lanes:
      lane.scheduler.publish(params, version)
      lane.wake.set()

  def turn(self, name: str) -> contextlib.AbstractContextManager[None]:
    """The place of another program, which uses devices of several processes, among those of the sampler.

    Whoever starts such a program does it in here, in all processes of a sampler in the same order. Of use where a
    sampler's own programs use devices of several processes (`leader`, `follower`); elsewhere it does nothing.
    """
    return contextlib.nullcontext()

  def check_params(self, params: Params) -> None:
    """Refuses parameters of another model.

    Raises:
      ConfigError: naming the first parameter that differs.
    """
    for lane in self._lanes:
      lane.scheduler.check_params(params)

  def stats(self) -> dict[str, float]:
    """Returns the statistics of `Scheduler.stats`, summed over the schedulers, and the oldest version."""
    stats = [lane.scheduler.stats() for lane in self._lanes]
    return {name: sum(each[name] for each in stats) for name in stats[0]} | {"version": self.version}

  def _run(self, lane: _Lane) -> None:
    try:
      while True:
        lane.wake.clear()  # before `_ended` is read, so that no wake after that is lost
        if self._ended is not None:
          break
        if not lane.scheduler.tick():
          lane.wake.wait()
    except BaseException as error:  # callers wait on this thread, so any exception must reach them
      self._end(error)
    lane.scheduler.fail(self._ended)

  def _end(self, error: BaseException) -> None:
    """Makes all threads leave; callers get the first error."""
    with self._lock:
      self._ended = self._ended or error
    for lane in self._lanes:
      lane.wake.set()


class _Lane:
  """A scheduler, the thread that ticks it, and the number of its running turns."""

  def __init__(self, scheduler: Scheduler, run: Callable[[_Lane], None]):
    self.scheduler, self.running = scheduler, 0
    self.wake = threading.Event()
    self.thread = threading.Thread(target=run, args=(self,), name="sampler", daemon=True)
