"""The asynchronous rollout loop: a thread with an asyncio event loop that keeps as many episodes under way as allowed.

        prompts -> ledger.start -> episode (environment <-> sampler) -> buffer.put ... buffer.take -> train step
                       ^                                                                                  |
                       +----------------------- on_version(v): step done, weights published --------------+

An episode that ends frees its place at once; nothing waits for the slowest rollout. A failure costs one rollout, and
its group. An exception that is not a rollout's own affair stops the loop and reaches the trainer as itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from sao_jax.config import RolloutConfig
from sao_jax.environments.base import Environment
from sao_jax.episode import BadPrompt, EnvironmentFailure, PromptKey, Trajectory
from sao_jax.rollout.bad_prompts import IN_A_ROW, BadPrompts
from sao_jax.rollout.buffer import Snapshot, TrajectoryBuffer
from sao_jax.rollout.entries import Rollout
from sao_jax.rollout.lockstep import LockStep
from sao_jax.rollout.loop_clock import LoopClock
from sao_jax.rollout.outages import Outages
from sao_jax.rollout.outcomes import (
  BadEvidence,
  LoopStopped,
  NothingButBadEvidence,
  NothingButBadPrompts,
  Outcome,
  Place,
  PromptsExhausted,
  RolloutSilent,
  UnexpectedFailure,
  check_identity,
  outcome_of,
  reason_of,
)
from sao_jax.rollout.prompt_stream import PromptStream
from sao_jax.rollout.run_episode import EpisodeLimits
from sao_jax.rollout.runner import EpisodeRunner, Sampler
from sao_jax.rollout.serialization import trajectories_from_state, trajectories_to_state
from sao_jax.rollout.watchdog import Activity, Watchdog, describe_tasks, describe_thread, report_callbacks

log = logging.getLogger(__name__)

IDLE_POLL = 0.5  # seconds between two looks at errors while the trainer waits until nothing is in flight


class RolloutLoop:
  """Runs episodes in its own thread, from `start` to `stop`; its other methods belong to the trainer's thread.

  Attributes:
    error: the exception that stopped the loop, or None.
    buffer: where finished trajectories go; the trainer takes them from there.
    ledger: the buffer's; knows where every rollout is.
  """

  def __init__(
    self,
    make_environment: Callable[[], Environment],
    prompts: PromptStream,
    sampler: Sampler,
    buffer: TrajectoryBuffer,
    config: RolloutConfig,
    *,
    context_length: int,
    vocab_size: int,
    max_in_flight: int,
    temperature: float = 1.0,
    watchdog_seconds: float = 600.0,
    on_trained: Callable[[Sequence[Trajectory]], None] = lambda trajectories: None,
  ):
    """Args:
    make_environment: a fresh environment for one episode.
    prompts: where prompts come from; they may end.
    sampler: generates actions; its exceptions stop the run.
    buffer: takes finished trajectories; its ledger decides what may start.
    config: turn and token limits, time-outs, retries.
    context_length: tokens of prompt + actions + observations.
    vocab_size: token ids lie below it.
    max_in_flight: episodes at the same time, usually the sampler's slots; the ledger may allow fewer.
    temperature: of sampling.
    watchdog_seconds: silence after which the run stops, unless it is the trainer's turn.
    on_trained: called with the trajectories of a train step that has ended, while no prompt is drawn.
    """
    self.error: BaseException | None = None
    self.buffer, self.ledger = buffer, buffer.ledger
    self._prompts, self._max_in_flight, self._on_trained = prompts, max_in_flight, on_trained
    self._outages = Outages(config.outage_seconds, in_rounds=config.deterministic, stop=self._fail, wake=self._wake)
    self._bad_prompts, self._filtered_in_a_row = BadPrompts(), 0

    # Deterministic runs sample in rounds, and are saved as they were at the last version.
    self._lockstep = LockStep(sampler) if config.deterministic else None
    self._boundary: Snapshot | None = None

    # How one rollout is run.
    self._sampler = self._lockstep or sampler
    self._clock = LoopClock()
    self._activity = Activity(lambda: getattr(self._sampler, "progress", None))
    self._awaited = False  # by the trainer, until nothing is in flight
    self._runner = EpisodeRunner(
      make_environment,
      self._sampler,
      EpisodeLimits.of(config, context_length=context_length, vocab_size=vocab_size),
      temperature=temperature,
      timeout=config.environment_timeout,
      retries=config.environment_retries,
      outages=self._outages,
      clock=self._clock,
      on_activity=self._activity.note,
      on_retry=self._count_retry,
      on_posed=self._bad_prompts.good,
      on_oldest=buffer.note_oldest,
    )

    # The thread, its event loop, and the one that watches them.
    self._tasks: dict[int, asyncio.Task] = {}
    self._event_loop: asyncio.AbstractEventLoop | None = None
    self._stopping = False
    self._thread = threading.Thread(target=self._run_thread, name="rollout", daemon=True)
    self._watchdog_seconds = watchdog_seconds
    self._watchdog = Watchdog(self._look, self._fail)

  def start(self) -> None:
    """Starts rolling out."""
    if self._lockstep is not None:
      self._boundary = self._snapshot()
    self._activity.note()
    self._thread.start()
    self._watchdog.start()

  def stop(self, timeout: float = 10.0) -> None:
    """Aborts what is in flight and ends the thread; a state taken afterwards still has it, to be rolled out again.

    A thread that an environment blocks for longer than `timeout` seconds is left behind, and logged.
    """
    self._stopping = True
    self.buffer.end(LoopStopped("the rollout loop was stopped"))
    self._wake()
    self._watchdog.stop()
    if self._thread.ident is not None and threading.current_thread() is not self._thread:
      self._thread.join(timeout)
      if self._thread.is_alive():
        log.error("the rollout thread did not end within %s s:\n%s", timeout, describe_thread(self._thread))

  def check(self) -> None:
    """Raises the exception that stopped the loop, or the sampler, as itself."""
    for error in (self.error, getattr(self._sampler, "error", None)):
      if error is not None:
        raise error

  def on_version(self, version: int) -> None:
    """Tells that `version` is published; the oldest batch in training, if there is one, is thereby trained on."""
    with self._between_prompts():
      if self.ledger.batches_in_training:
        self._on_trained(self.buffer.batch_done(version))
      else:
        self.buffer.set_version(version)
      if self._lockstep is not None:  # nothing is in flight, and under the lock nothing can start
        self._boundary = self._snapshot()
    self.buffer.free()
    self._wake()

  def wait_until_idle(self, timeout: float | None = None, look: Callable[[], object] = lambda: None) -> None:
    """Waits until every rollout that may be under way has ended: the calm between two versions of a deterministic run.

    `look` is called now and then, and may raise.

    Raises:
      TimeoutError: not within `timeout` seconds.
      Exception: what stopped the loop, as itself.
    """
    idle, self._awaited = False, True
    while not idle:
      began = time.monotonic()
      idle = self.buffer.wait_for(lambda: self.error is not None or self.ledger.idle, timeout or IDLE_POLL)
      with self.ledger.lock:
        self.buffer.statistics.add("trainer_wait_seconds", time.monotonic() - began)

      # A sampler that has died makes nothing idle: look at it now and then.
      self.check()
      look()
      if not idle and timeout is not None:
        raise TimeoutError(f"rollouts are under way after {timeout} s: {self.ledger.counters()}")
    self._awaited = False

  def note_step(self, seconds: float, busy_seconds: float) -> None:
    """Notes that a train step has ended: it took so long, of which the trainer was busy so long."""
    with self.ledger.lock:
      for name, amount in (("steps", 1), ("seconds", seconds), ("busy_seconds", busy_seconds)):
        self.buffer.statistics.add(name, amount)

  def stats(self) -> dict[str, Any]:
    """Counters by place, outcome and reason, statistics, the event loop's longest standstill since the last call.

    Checks the identity of the counters.
    """
    with self.ledger.lock:
      counters, capacity = self.ledger.counters(), self.ledger.capacity
      summary = self.buffer.statistics.summary()
    check_identity(counters)
    return {**counters, **summary, "max_event_loop_gap": self._clock.take_longest(), "capacity": capacity}

  def state_dict(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns (JSON, numpy arrays): everything needed to go on, taken at one instant.

    What is in flight, or was when the loop stopped, is saved as prompts, to be rolled out again under the same rollout
    ids; what is in training is saved as buffered. So it belongs with the parameters of the last version that
    `on_version` was told. A deterministic run is saved as it was at that moment, with nothing in flight.
    """
    with self._between_prompts():
      snapshot = self._boundary or self._snapshot()
    # Outside the lock: copying a large buffer must not hold up the event loop.
    records, arrays = trajectories_to_state(snapshot.trajectories)
    return {"intake": snapshot.intake, "buffer": snapshot.buffer, "trajectories": records}, arrays

  def load_state_dict(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Goes on from a saved state; call it before `start`."""
    trajectories = trajectories_from_state(state["trajectories"], arrays)
    self._prompts.set_state(state["intake"]["prompts"])
    self.buffer.restore(Snapshot(state["intake"], state["buffer"], trajectories))

  @contextlib.contextmanager
  def _between_prompts(self) -> Iterator[None]:
    """Holds the ledger while no prompt is drawn; does not wait for a source that hangs once the loop is over."""
    drawing = self.ledger.drawing
    held = drawing.acquire(timeout=IDLE_POLL)
    while not held and self.error is None and not self._stopping:
      held = drawing.acquire(timeout=IDLE_POLL)
    try:
      with self.ledger.lock:
        yield
    finally:
      if held:
        drawing.release()

  def _snapshot(self) -> Snapshot:
    """Under the lock; cheap."""
    snapshot = self.buffer.snapshot()
    return snapshot._replace(intake=snapshot.intake | {"prompts": self._prompts.get_state()})

  # The rest runs in the loop's thread, except where it says otherwise.

  def _run_thread(self) -> None:
    # Not asyncio.run, which at the end would wait for tasks and executor threads that hang.
    event_loop = asyncio.new_event_loop()
    main = event_loop.create_task(self._main())
    try:
      while not main.done():
        try:
          event_loop.run_until_complete(main)
        except BaseException as error:  # SystemExit of a task leaves the event loop, which then ends in order
          self._fail(error)
    finally:
      event_loop.close()

  async def _main(self) -> None:
    # From here on other threads can wake this loop.
    self._awake = asyncio.Event()
    self._event_loop = asyncio.get_running_loop()
    report_callbacks(self._event_loop, self._fail)
    self.ledger.on_capacity, self.ledger.on_cancel = self._wake, self._cancel
    self._clock.start()

    try:
      while not self._stopping and self.error is None:
        self._awake.clear()
        self._start_rollouts()
        await self._awake.wait()
    except BaseException as error:  # whatever it is, it must reach the main loop
      self._fail(error)
    finally:
      # Nobody wakes it any more: what runs is aborted.
      self.ledger.on_capacity, self.ledger.on_cancel = lambda: None, lambda rollout_id: None
      for task in self._tasks.values():
        task.cancel()
      if self._tasks:
        await asyncio.wait(set(self._tasks.values()), timeout=5.0)
      self.ledger.abort_waiting()

      # Environments that are being closed, and calls that were given up; some of them may never end.
      if rest := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(rest, timeout=1.0)

  def _start_rollouts(self) -> None:
    while len(self._tasks) < self._max_in_flight and self.error is None:
      try:
        with self._clock.holding("drawing a prompt"):
          rollout = self.ledger.start(self._prompts, self._may_begin, draw=self._outages.some_up)
      except BadPrompt as problem:
        self._skip(problem)
        continue
      if rollout is None:
        break
      task = asyncio.create_task(self._run(rollout), name=f"rollout {rollout.rollout_id}")
      self._tasks[rollout.rollout_id] = task
      task.add_done_callback(functools.partial(self._reap, rollout.rollout_id))
      if self._lockstep is not None:
        self._lockstep.enter()

    with self.ledger.lock:
      self.buffer.statistics.occupy(len(self._tasks), self._max_in_flight)
    if self.ledger.exhausted and not self._tasks and not self.ledger.count(Place.IN_FLIGHT):
      self.buffer.end(PromptsExhausted("the prompts have ended, and what is left does not fill a batch"))

  async def _run(self, rollout: Rollout) -> None:
    """One rollout, into the buffer or to its outcome; when it raises or is cancelled instead, it is aborted."""
    try:
      trajectory = await self._runner.run(rollout)
      with self._clock.holding("checking trajectories"):
        self.buffer.put(trajectory)
      self._filtered_in_a_row = 0

    # A fault of the environment costs its rollout, and is worth a traceback where nobody expected it.
    except EnvironmentFailure as failure:
      unexpected = isinstance(failure, UnexpectedFailure)
      level = logging.ERROR if unexpected else logging.WARNING
      log.log(level, "rollout %d is dropped: %s", rollout.rollout_id, failure, exc_info=unexpected)
      self.ledger.fail(rollout.rollout_id, outcome_of(failure), reason_of(failure))

    # A prompt that nobody can attempt is skipped; the run goes on with the next one.
    except BadPrompt as problem:
      self.ledger.fail(rollout.rollout_id, Outcome.SKIPPED_PROMPT, problem.reason)
      self._skip(problem, rollout.prompt.key)

    # What the sampler recorded and cannot be true costs its rollout, too; nothing else for long is a broken sampler.
    except BadEvidence as problem:
      log.warning("rollout %d is filtered: %s", rollout.rollout_id, problem)
      self.ledger.fail(rollout.rollout_id, Outcome.FILTERED, problem.reason)
      self._filtered_in_a_row += 1
      if self._filtered_in_a_row >= IN_A_ROW:
        self._fail(NothingButBadEvidence(self._filtered_in_a_row, problem))

    self._activity.note()

  def _reap(self, rollout_id: int, task: asyncio.Task) -> None:
    """Cleans up when the task of a rollout has ended, however it did."""
    del self._tasks[rollout_id]
    try:
      if task.cancelled() or task.exception() is not None:
        cut_here = self.ledger.abort(rollout_id)  # else the ledger had it cancelled, with its group
        if not task.cancelled():
          self._fail(task.exception())
        elif cut_here and not self._stopping and self.error is None:
          self._fail(RuntimeError(f"{task.get_name()} was cancelled from outside the loop"))

      if self._lockstep is not None and not self._stopping and self.error is None:
        self._start_rollouts()  # what takes its place must be there before the next round begins
        self._lockstep.leave()
    except BaseException as error:  # of the prompt source, for one: a callback's own would end in asyncio's log
      self._fail(error)
    self._awake.set()

  def _may_begin(self, rollout: Rollout) -> bool:
    return self._outages.admits(rollout.prompt.key.environment)

  def _skip(self, problem: BadPrompt, key: PromptKey | None = None) -> None:
    """Takes note of a prompt that was skipped; nothing but such prompts stops the run."""
    try:
      self._bad_prompts.skip(problem, key)
    except NothingButBadPrompts as error:
      self._fail(error)

  def _count_retry(self) -> None:
    self._activity.note()
    with self.ledger.lock:
      self.buffer.statistics.add("retries")

  def _cancel(self, rollout_id: int) -> None:
    """Stops a rollout whose outcome is known already; from any thread."""
    # At once, as a round of a deterministic run must not begin with it; but not in the middle of its own work, which it
    # may just be reporting.
    here = threading.current_thread() is self._thread
    if here and self._tasks.get(rollout_id) is not asyncio.current_task():
      self._cancel_task(rollout_id)
    else:
      with contextlib.suppress(RuntimeError):  # the event loop has been closed, and its tasks have ended
        self._event_loop.call_soon_threadsafe(self._cancel_task, rollout_id)

  def _cancel_task(self, rollout_id: int) -> None:
    if rollout_id in self._tasks:  # it may just have ended
      self._tasks[rollout_id].cancel()

  def _wake(self) -> None:
    """Lets the loop look again; from any thread."""
    if self._event_loop is not None:
      with contextlib.suppress(RuntimeError):  # it has been closed: nobody is left to wake
        self._event_loop.call_soon_threadsafe(self._awake.set)

  def _fail(self, error: BaseException) -> None:
    """Stops the loop and tells the trainer; from any thread. The first error stays."""
    with self.ledger.lock:
      self.error = error if self.error is None else self.error
    self.buffer.fail(self.error)
    self._wake()

  def _look(self) -> None:
    """Looks, in the watchdog's thread, for an error that nobody was told, and for silence."""
    self.check()
    # It is the trainer's turn when nothing may start, and while it computes, perhaps on the sampler's own devices.
    computes = self.ledger.batches_in_training and not self._awaited
    if self.ledger.idle or computes:
      self._activity.note()
    elif self._activity.silence > self._watchdog_seconds:
      tasks = () if self._event_loop is None else asyncio.all_tasks(self._event_loop)  # None: its thread has not begun
      raise RolloutSilent(
        f"nothing has happened for {self._activity.silence:.0f} s\n{self.ledger.counters()}\n"
        f"{describe_tasks(tasks)}\nrollout thread:\n{describe_thread(self._thread)}"
      )
