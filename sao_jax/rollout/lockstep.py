"""A sampler in rounds, for deterministic runs: what is sampled together depends on the rollouts alone, never on timing.

Log-probs of one token can differ in the last bit with the company that a batch gives it, and continuous batching leaves
that company to chance. Here a round begins when every live episode waits for its turn, all turns of a round go to the
sampler as one, in the order of rollout ids, and no answer is handed out before all are there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Sequence
from typing import Protocol

from sao_jax.sampler.requests import Completion, GenerateRequest


class BatchSampler(Protocol):
  """The part of a sampler that a lockstep needs."""

  def new_session(self) -> int: ...
  def submit_all(self, requests: Sequence[GenerateRequest]) -> list[concurrent.futures.Future[Completion]]: ...
  def release(self, session_id: int) -> None: ...


class LockStep:
  """Takes the place of a sampler for one event loop; `enter` and `leave` tell it how many episodes are live."""

  def __init__(self, sampler: BatchSampler):
    self._sampler = sampler
    self._live = 0
    self._waiting: dict[int, tuple[GenerateRequest, asyncio.Future[Completion]]] = {}
    self._round: asyncio.Task | None = None  # an event loop holds tasks only weakly

  @property
  def error(self) -> BaseException | None:
    """The fault that ended the sampler."""
    return getattr(self._sampler, "error", None)

  @property
  def progress(self) -> object:
    """See `SamplerService`."""
    return getattr(self._sampler, "progress", None)

  def enter(self) -> None:
    """One more episode is live."""
    self._live += 1

  def leave(self) -> None:
    """One episode is over; call it after those that take its place have entered."""
    self._live -= 1
    self._begin_round()

  def new_session(self) -> int:
    """See `SamplerService`."""
    return self._sampler.new_session()

  def release(self, session_id: int) -> None:
    """See `SamplerService`."""
    self._sampler.release(session_id)

  async def generate(self, request: GenerateRequest) -> Completion:
    """Samples one turn, in the next round; raises what the sampler raises."""
    answer = asyncio.get_running_loop().create_future()
    self._waiting[request.rollout_id] = (request, answer)
    self._begin_round()
    try:
      return await answer
    except asyncio.CancelledError:
      self._waiting.pop(request.rollout_id, None)
      raise

  def _begin_round(self) -> None:
    if self._round is None and self._waiting and len(self._waiting) == self._live:
      self._round = asyncio.create_task(self._run_round(), name="lockstep round")
      self._round.add_done_callback(lambda task: task.cancelled() or task.result())  # the event loop reports a fault

  async def _run_round(self) -> None:
    turns = [self._waiting[rollout_id] for rollout_id in sorted(self._waiting)]
    self._waiting.clear()

    # Nobody gets an answer before all are there.
    try:
      futures = self._sampler.submit_all([request for request, _ in turns])
      results = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    except asyncio.CancelledError:
      raise
    except BaseException as error:  # whatever it is, those who wait must hear of it
      results = [error] * len(turns)
    self._round = None

    for (_, answer), result in zip(turns, results, strict=True):
      if answer.done():  # its episode was cancelled
        continue
      if isinstance(result, BaseException):
        answer.set_exception(result)
      else:
        answer.set_result(result)
    self._begin_round()  # everybody may wait already, if all of this round were cancelled
