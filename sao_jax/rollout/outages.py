"""Outages: an environment that does nothing but fail, which all its rollouts notice at once.

An attempt that fails says little; several in a row, without an answer in between, mean that the environment is down.
Then attempts wait for their turn, one after the other: one goes ahead as a probe, the next one after a pause that
doubles with every probe that fails. As soon as the environment answers, all go on. So an outage costs a few probes, not
every prompt that is drawn meanwhile; what was in flight is tried again afterwards, if its failure is retryable.

An outage that lasts is an error: it stops the run. Its age counts while somebody makes an attempt, or wants to.

Circuit breakers (M. Nygard, Release It!, 2007), with exponential back-off and jitter.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable

import numpy as np

from sao_jax.episode import EnvironmentFailure, GraderFailure
from sao_jax.rollout.outcomes import EnvironmentDown

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.5  # seconds before the first retry, or probe; doubled for every further one
LONGEST_PAUSE = 30.0  # seconds
PART = 1 / 8  # of `outage_seconds`: no pause is longer than this, so that an outage is judged by several probes
DOWN_AFTER = 8  # failures in a row, without any answer in between


@dataclasses.dataclass(eq=False)
class Attempt:
  """One attempt at a rollout.

  Attributes:
    environment: name.
    rollout_id: number of the rollout.
    within: it began within an outage, that is, after a failure, and before an attempt ended well.
    probe: it began while the environment was down.
    late: it began when the outage had lasted long enough to stop the run.
    answered: the environment has answered an action of it since the outage began.
  """

  environment: str
  rollout_id: int
  within: bool = False
  probe: bool = False
  late: bool = False
  answered: bool = False


@dataclasses.dataclass(eq=False)
class _Record:
  """One environment.

  Attributes:
    last: the last failure since an attempt ended well; None if there was none.
    age: seconds that the outage has lasted, as of `seen`.
    failures: attempts that failed since an attempt ended well.
    in_a_row: those of them since the last answer that proved something.
    deceptive: an attempt of this outage failed although it had been answered, so answers prove nothing.
    probes: those of the failures that were probes.
    next_probe: time of the event loop before which nobody goes ahead.
    tickets: probes that admission has let through and that have not begun.
    wanted: admission has a rollout that waits.
    present: rollouts that make an attempt, or wait to.
    running: the attempts under way.
    waiters: those that wait for their turn, first come, first served.
    timer: looks for the next probe.
  """

  last: EnvironmentFailure | None = None
  age: float = 0.0
  seen: float = 0.0
  failures: int = 0
  in_a_row: int = 0
  deceptive: bool = False
  probes: int = 0
  next_probe: float = 0.0
  tickets: int = 0
  wanted: bool = False
  present: int = 0
  running: set[Attempt] = dataclasses.field(default_factory=set)
  waiters: collections.deque[asyncio.Future] = dataclasses.field(default_factory=collections.deque)
  timer: asyncio.TimerHandle | None = None

  @property
  def down(self) -> bool:
    return self.in_a_row >= DOWN_AFTER


class Outages:
  """Watches the attempts of every environment by its name; lives in one event loop, whose clock it reads.

  Bad evidence and bad prompts are not the environment's failure: they change nothing here.

  Attributes:
    seconds: `rollout.outage_seconds`.
  """

  def __init__(
    self,
    seconds: float = 300.0,
    *,
    in_rounds: bool = False,
    stop: Callable[[EnvironmentDown], None] = lambda error: None,
    wake: Callable[[], None] = lambda: None,
  ):
    """Args:
    seconds: of nothing but failures, after which `stop` is called.
    in_rounds: attempts wait for each other in rounds (deterministic runs): all pause, and nobody goes ahead alone.
    stop: called with the error once an outage has lasted for so long, and at every failure from then on.
    wake: called when a rollout that `admits` has refused may ask again.
    """
    self.seconds, self._in_rounds, self._stop, self._wake = seconds, in_rounds, stop, wake
    self._records: dict[str, _Record] = collections.defaultdict(_Record)

  @property
  def some_up(self) -> bool:
    """Tells whether any environment is up, as far as is known."""
    return self._in_rounds or not self._records or not all(record.down for record in self._records.values())

  def admits(self, environment: str) -> bool:
    """Tells whether a new rollout may begin now; where the environment is down, a yes makes it the next probe."""
    record = self._records[environment]
    if self._in_rounds or not record.down:
      return True
    self._advance(record)
    waiting = any(not waiter.done() for waiter in record.waiters)
    record.wanted = waiting or record.seen < record.next_probe
    if record.wanted:
      self._schedule(record)
      return False
    self._next_pause(record)
    record.tickets += 1
    return True

  @contextlib.asynccontextmanager
  async def attempt(self, environment: str, rollout_id: int, number: int = 0) -> AsyncIterator[Attempt]:
    """Waits for the turn of an attempt, and learns from its end.

    Args:
      environment: its name.
      rollout_id: number of the rollout; with `number` it determines the jitter.
      number: attempts at the rollout before; they are backed off from.
    """
    record = self._records[environment]
    self._advance(record)
    record.present += 1
    attempt = Attempt(environment, rollout_id)
    try:
      # Back off, and wait for the turn.
      if number:
        await asyncio.sleep(self.pause(number - 1, rollout_id))
      await self._turn(record, rollout_id)
      self._advance(record)
      attempt.within, attempt.probe, attempt.late = record.last is not None, record.down, record.age >= self.seconds
      record.running.add(attempt)
      yield attempt
    except EnvironmentFailure as failure:
      self._advance(record)
      record.running.discard(attempt)
      self._failed(record, attempt, failure)
      raise
    else:
      self._recovered(record, attempt, ended_well=True)
    finally:
      self._advance(record)
      record.running.discard(attempt)
      record.present -= 1

  def answered(self, attempt: Attempt) -> None:
    """Takes note that the environment has answered an action, and that the episode goes on."""
    attempt.answered = True
    record = self._records[attempt.environment]
    grader = isinstance(record.last, GraderFailure)  # which only the end of an episode asks
    if record.in_a_row and not grader and not record.deceptive:
      self._recovered(record, attempt, ended_well=False)

  def pause(self, doublings: int, rollout_id: int) -> float:
    """Seconds of a pause: doubled so many times, within its bounds, times 0.5 ... 1.5 drawn from the rollout's id."""
    jitter = np.random.default_rng([rollout_id, doublings]).uniform(0.5, 1.5)
    return float(min(FIRST_PAUSE * 2.0 ** min(doublings, 60), LONGEST_PAUSE, PART * self.seconds) * jitter)

  async def _turn(self, record: _Record, rollout_id: int) -> None:
    if not record.down:
      return
    if self._in_rounds:
      await asyncio.sleep(self.pause(record.probes, rollout_id))
    elif record.tickets:
      record.tickets -= 1
    else:
      waiter = asyncio.get_running_loop().create_future()
      record.waiters.append(waiter)
      self._schedule(record)
      await waiter

  def _failed(self, record: _Record, attempt: Attempt, failure: EnvironmentFailure) -> None:
    # The first failure after all was well begins the count.
    if record.last is None:
      record.age, record.failures, record.deceptive = 0.0, 0, False
      for other in record.running:
        other.answered = False
    record.last = failure
    record.failures += 1
    record.in_a_row += 1
    record.deceptive |= attempt.within and attempt.answered

    # A probe that failed makes the pauses longer; the first ones are short.
    if attempt.probe:
      record.probes += 1
    if attempt.probe or record.in_a_row == DOWN_AFTER:
      self._next_pause(record, attempt.rollout_id)
    if record.in_a_row == DOWN_AFTER:
      log.warning(
        "environment %r is down: %d attempts in a row failed, the last one with: %s. Further ones wait, and go ahead "
        "one by one until it answers, for rollout.outage_seconds=%g",
        *(attempt.environment, record.in_a_row, failure, self.seconds),
      )

    # An episode that gets answers may still end well; those that began too late are not waited for.
    promising = any(other.answered and not other.late for other in record.running)
    if record.age >= self.seconds and not promising:
      self._stop(EnvironmentDown(attempt.environment, record.age, record.failures, failure))

  def _recovered(self, record: _Record, attempt: Attempt, *, ended_well: bool) -> None:
    """Lets everybody go on; an attempt that ended well is the end of the outage, too."""
    self._advance(record)
    was_down = record.down
    record.in_a_row = record.probes = record.tickets = 0
    record.wanted = False
    if was_down:
      log.warning("environment %r answers again, after %.3g s", attempt.environment, record.age)
    if ended_well:
      record.last, record.age = None, 0.0
    if not was_down:
      return
    for waiter in record.waiters:
      if not waiter.done():
        waiter.set_result(None)
    record.waiters.clear()
    self._wake()

  def _advance(self, record: _Record) -> None:
    """Lets the outage grow older, if somebody wanted something of the environment meanwhile."""
    now = asyncio.get_running_loop().time()
    if record.last is not None and (record.present or record.wanted):
      record.age += now - record.seen
    record.seen = now

  def _next_pause(self, record: _Record, rollout_id: int = 0) -> None:
    record.next_probe = record.seen + self.pause(record.probes, rollout_id)

  def _schedule(self, record: _Record) -> None:
    if record.timer is None:
      when = max(record.next_probe, record.seen)
      record.timer = asyncio.get_running_loop().call_at(when, self._look, record)

  def _look(self, record: _Record) -> None:
    """Lets the first that waits go ahead, once the pause is over; else admission may ask again."""
    record.timer = None
    self._advance(record)
    while record.waiters and record.waiters[0].done():  # its rollout was cancelled
      record.waiters.popleft()
    if not record.down:
      return
    if record.seen < record.next_probe:  # a probe has failed since
      self._schedule(record)
    elif not record.waiters:
      record.wanted = False
      self._wake()
    else:
      self._next_pause(record)
      record.waiters.popleft().set_result(None)
      if record.waiters or record.wanted:
        self._schedule(record)
