"""Assignment of trajectories to slots: continuous batching on the host, deterministic and single-threaded."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sao_jax.errors import ConfigError
from sao_jax.parallel.params import Params
from sao_jax.sampler.counters import Counters
from sao_jax.sampler.dispatch_length import best_num_steps
from sao_jax.sampler.engine import Dispatch, Engine, Prefill
from sao_jax.sampler.prefill import whole
from sao_jax.sampler.requests import GenerateRequest, SessionReleasedError, request_problem
from sao_jax.sampler.session import OnDone, Session, Turn
from sao_jax.sampler.slot_times import SlotTimes


class Started(NamedTuple):
  """A call whose results are still on the device.

  Attributes:
    tick: that of its start.
    read: reads the results.
    slots: those that a decode call works on.
  """

  tick: int
  read: Callable[[], None]
  slots: frozenset[int] = frozenset()


class Scheduler:
  """Feeds an engine: `submit`, `release` and `publish` from any thread, `tick` from one.

  A tick takes what was submitted, applies the latest publish, fills free slots (a finished turn leaves its slot while
  the others go on), starts dispatches, and then reads those of the tick before: the device never waits for the host. A
  slot whose budget ends inside a dispatch is refilled without reading that dispatch first.

  Where dispatches read prompts, each reads a chunk of those that wait, the oldest first, in the step that gives the
  other turns their next token: nobody stands still for a long prompt. As long as prompts are waiting for the next
  chunk, dispatches have that one step.

  A session that waits for its environment keeps its slot. When turns queue and no slot is free, the session that has
  waited longest is parked, if it has waited for `park_after` ticks or nothing is being decoded: its cache is given up,
  its tokens stay on the host and are prefilled when it returns.

  Where slots share pages, a turn starts when there are pages for its tokens, and gets more as it grows. When they run
  out, waiting sessions are parked first; then the turn that came last gives its slot up, to be continued in the same
  way. The turn that came first is never held up: no turn is lost, and none waits for ever.

  >>> import jax
  >>> from sao_jax.config import ModelConfig, SamplerConfig
  >>> from sao_jax.models.transformer import param_specs
  >>> from sao_jax.parallel.params import init_params
  >>> model = ModelConfig(vocab_size=8, num_layers=1, d_model=4, num_heads=1, num_kv_heads=1, head_dim=4, d_ff=4)
  >>> config = SamplerConfig(num_slots=2, context_length=16, decode_steps=4, prefill_buckets=(16,))
  >>> scheduler = Scheduler(Engine(init_params(param_specs(model), jax.random.key(0)), model, config, seed=0))
  >>> completions = []
  >>> for i in range(3):  # one more than there are slots
  ...   scheduler.submit(GenerateRequest(i, i, new_token_ids=(1, 2), max_tokens=2 + i), completions.append)
  >>> while scheduler.tick():
  ...   pass
  >>> sorted(len(completion.token_ids) for completion in completions)
  [2, 3, 4]
  """

  def __init__(self, engine: Engine, *, park_after: int = 4, clock: Callable[[], float] = time.monotonic):
    """Takes over `engine`; `park_after` is in ticks, `clock` in seconds."""
    self._engine, self._park_after = engine, park_after
    self._inbox: collections.deque[Callable[[], None]] = collections.deque()  # calls for the next tick to make
    self._sessions: dict[int, Session] = {}
    self._free = set(range(engine.config.num_slots))
    self._arrivals = itertools.count()  # numbers sessions in the order in which they got their slots

    # A turn waits in one of three queues until it has a slot, then for its prompt to be read, then it is decoded.
    self._ready: list[Session] = []  # sessions that have their slot
    self._returning: collections.deque[Session] = collections.deque()  # parked sessions
    self._fresh: collections.deque[Session] = collections.deque()  # first turns
    self._reading: list[Session] = []  # those with `unread` tokens
    self._decoding: list[Session] = []

    # Calls whose results are still on the device, oldest first.
    self._started: collections.deque[Started] = collections.deque()
    self._published: tuple[Params, int] | None = None
    self._error: BaseException | None = None
    self._ticks = 0
    self._counters = Counters()
    self._slot_times = SlotTimes(engine.config.num_slots, clock)

  @property
  def version(self) -> int:
    """Policy version of the next dispatch."""
    return self._engine.version

  @property
  def progress(self) -> int:
    """Number of pieces of work done: tokens written and sampled, dispatches, publishes; from any thread."""
    counters = self._counters
    return counters.prefilled_tokens + counters.sampled_tokens + counters.dispatches + counters.publishes

  @property
  def compiling(self) -> bool:
    """True while the engine compiles a program; from any thread."""
    return self._engine.compiling

  def submit(self, request: GenerateRequest, on_done: OnDone) -> None:
    """Queues a turn; the ticking thread calls `on_done` once, with a Completion or an exception."""
    self.submit_all([(request, on_done)])

  def submit_all(self, turns: Sequence[tuple[GenerateRequest, OnDone]]) -> None:
    """Queues several turns as one: no tick sees some of them without the others."""

    def accept() -> None:
      for request, on_done in turns:
        self._accept(request, on_done)

    self._inbox.append(accept)

  def release(self, session_id: int) -> None:
    """Forgets a session and frees its slot; a running turn ends with `SessionReleasedError`."""
    self._inbox.append(functools.partial(self._forget, session_id))

  def check_params(self, params: Params) -> None:
    """Refuses parameters of another model; see `Engine.check_params`."""
    self._engine.check_params(params)

  def publish(self, params: Params, version: int) -> None:
    """Hands new parameters to the next dispatch; of several publishes between two ticks the last one counts.

    Raises:
      ConfigError: the parameters are of another model.
    """
    self._engine.check_params(params)
    self._inbox.append(functools.partial(setattr, self, "_published", (params, version)))

  def stats(self) -> dict[str, float]:
    """Returns the counters, the slots' time in each state, and the present lengths of the queues."""
    sessions = tuple(self._sessions.values())
    queued = len(self._ready) + len(self._returning) + len(self._fresh)
    now = {
      "queued_turns": queued,
      "decoding_turns": sum(session.turn is not None for session in sessions) - queued,
      "waiting_sessions": sum(session.turn is None and session.slot is not None for session in sessions),
      "free_slots": len(self._free),
      "version": self._engine.version,
    }
    return dataclasses.asdict(self._counters) | self._slot_times.seconds() | now

  def tick(self) -> bool:
    """Does one round of work; returns False if there was none.

    Raises:
      RuntimeError: a slot overflowed its cache, which the budgets exclude.
    """
    # Take what other threads have asked for.
    self._ticks += 1
    worked = bool(self._inbox)
    while self._inbox:
      self._inbox.popleft()()
    if self._published is not None:
      self._apply_publish()

    # Give the device its next work, then read the work of the tick before.
    prefilling = self._fill_slots()
    self._note_slots(prefilling)
    self._start_dispatches()
    worked = worked or bool(self._started)
    while self._started and self._started[0].tick < self._ticks:
      self._read_next()
    return worked

  def fail(self, error: BaseException) -> None:
    """Ends every turn with `error`: those queued or running now, and those submitted later."""
    self._error = error
    while self._inbox:
      self._inbox.popleft()()
    for session in list(self._sessions.values()):
      if session.turn is not None:
        turn, session.turn = session.turn, None
        turn.on_done(error)
    self._sessions.clear()

  def _accept(self, request: GenerateRequest, on_done: OnDone) -> None:
    """Takes a request; an error in it goes to its caller alone."""
    session = self._sessions.get(request.session_id) or Session(request.rollout_id, request.weights)
    kept = 0 if request.new_context else len(session.token_ids)
    total = kept + len(request.new_token_ids)
    budget = min(request.max_tokens, self._engine.config.context_length - total)
    error = self._error or _refusal(request, session, total, self._engine)
    if error is not None:
      on_done(error)
      return

    # The session takes the tokens; its turn gets what the context has left.
    fresh = not session.token_ids
    self._sessions[request.session_id] = session
    if request.new_context:
      session.begin_context()
      if session.slot is not None:
        self._engine.release(session.slot)  # what the old context held; the new one takes what it needs
    session.token_ids += [int(token) for token in request.new_token_ids]
    session.turn = Turn(request, on_done, budget=max(budget, 0), steps_left=0)

    # Queue it, unless the context is full already.
    if budget <= 0:
      self._finish(session)
    elif session.slot is not None:
      self._ready.append(session)
    else:
      (self._fresh if fresh else self._returning).append(session)

  def _forget(self, session_id: int) -> None:
    session = self._sessions.pop(session_id, None)
    if session is None:
      return
    self._free_slot(session)
    for queue in (self._ready, self._returning, self._fresh, self._reading, self._decoding):
      if session in queue:
        queue.remove(session)
    if session.turn is not None:
      turn, session.turn = session.turn, None
      turn.on_done(SessionReleasedError(f"session {session_id} was released"))

  def _apply_publish(self) -> None:
    (params, version), self._published = self._published, None

    # Before caches are recomputed, the host must know all tokens that were sampled.
    reprefill = self._engine.config.kv_after_publish == "reprefill"
    if reprefill:
      self._read_started()
    self._engine.publish(params, version)
    self._counters.publishes += 1

    if reprefill:
      outdated = [session for session in self._sessions.values() if session.weights is None]
      for session in outdated:
        session.written = 0  # a waiting session is prefilled when its next turn comes
      running = [session for session in (*self._reading, *self._decoding) if session.weights is None]
      self._reading = [session for session in self._reading if session not in running]
      self._decoding = [session for session in self._decoding if session not in running]
      self._begin(running)
      self._counters.reprefilled += len(running)

  def _fill_slots(self) -> int:
    """Starts turns in free slots and in those that they hold already; returns how many have their tokens read now."""
    # Turns in slots that they hold come first. One that gets no room waits with the parked ones.
    for session in sorted(self._ready, key=lambda session: session.arrival):
      self._reserve(session, self._first_length(session))

    while self._returning or self._fresh:
      queue = self._returning or self._fresh
      if not self._take_slot(queue[0]):
        break
      self._ready.append(queue.popleft())

    # All turns that have a slot start together.
    started, self._ready = self._ready, []
    self._begin(started)
    return len(self._reading or started)

  def _take_slot(self, session: Session) -> bool:
    """Gives a session a slot with room for its tokens, for which waiting sessions may be parked."""
    while True:
      # The slot with the most free pages to take; of equal ones the lowest.
      slot = max(self._free, key=lambda slot: (self._engine.num_free_pages(slot), -slot), default=None)
      if slot is not None and self._engine.reserve(slot, self._first_length(session)):
        self._free.remove(slot)
        session.slot, session.arrival = slot, next(self._arrivals)
        return True
      if not self._park_longest_idle():
        return False

  def _first_length(self, session: Session) -> int:
    """Tokens in the cache after the first dispatch of a turn, at most."""
    return self._after_dispatch(len(session.token_ids) - 1)

  def _after_dispatch(self, length: int) -> int:
    config = self._engine.config
    return min(length + config.decode_steps, config.context_length)

  def _reserve(self, session: Session, length: int) -> None:
    """Makes room for a turn that has a slot; if only older ones could make it, the turn itself gives its slot up."""
    while session.slot is not None and not self._engine.reserve(session.slot, length):
      idle = [other for other in self._idle() if self._engine.share_room(other.slot, session.slot)]
      if idle:
        self._park(min(idle, key=lambda session: session.idle_since))
      elif self._started:
        self._read_started()  # turns may have ended; and who gives up its slot must have all of its tokens
      else:
        running = [*self._decoding, *self._reading, *self._ready]
        rivals = [other for other in running if self._engine.share_room(other.slot, session.slot)]
        self._preempt(max(rivals, key=lambda session: session.arrival))

  def _preempt(self, session: Session) -> None:
    for running in (self._decoding, self._reading, self._ready):
      if session in running:
        running.remove(session)
    self._free_slot(session)
    session.written, session.unread = 0, None
    self._returning.appendleft(session)
    self._counters.preempted += 1

  def _note_slots(self, prefilling: int) -> None:
    # A slot works for a turn, be it that its last tokens are still on the device, after the slot was given back.
    held = {session.slot: session.turn is not None for session in self._sessions.values() if session.slot is not None}
    working = {slot for slot, turn in held.items() if turn}.union(*(call.slots for call in self._started))
    waiting, all_slots = len(held.keys() - working), self._engine.config.num_slots
    self._slot_times.note(len(working) - prefilling, prefilling, waiting, free=all_slots - len(working) - waiting)

  def _begin(self, sessions: list[Session]) -> None:
    """Begins turns with the tokens that their slots lack: dispatches read them in pieces, or calls of their own do."""
    if self._engine.reads_prompts:
      for session in sessions:
        session.unread = whole(session.extension())
      self._reading += sessions
      return

    self._decoding += sessions
    for part in _by_weights(sessions):
      extensions = [session.extension() for session in part]
      self._counters.prefilled_tokens += sum(len(extension.token_ids) - 1 for extension in extensions)
      by_slot = {session.slot: session for session in part}
      for prefill in self._engine.extend(extensions, part[0].weights):
        self._started.append(Started(self._ticks, functools.partial(self._read_prefill, prefill, by_slot)))

  def _park_longest_idle(self) -> bool:
    idle = self._idle()
    if not idle:
      return False
    session = min(idle, key=lambda session: session.idle_since)
    if self._ticks - session.idle_since < self._park_after and (self._decoding or self._reading or self._ready):
      return False
    self._park(session)
    return True

  def _idle(self) -> list[Session]:
    """Sessions that keep a slot while their environment works."""
    return [session for session in self._sessions.values() if session.turn is None and session.slot is not None]

  def _park(self, session: Session) -> None:
    self._free_slot(session)
    session.written = 0
    self._counters.parked += 1

  def _start_dispatches(self) -> None:
    """Starts a dispatch per `decode_batch` running turns, of like length: a dispatch reads one window of the cache.

    A dispatch samples with one policy. Every turn gets room for its longest possible dispatch, the oldest first.
    """
    for session in sorted((*self._decoding, *self._reading), key=lambda session: session.arrival):
      if session in self._decoding or session in self._reading:
        self._reserve(session, self._after_dispatch(session.written))

    self._decoding.sort(key=lambda session: session.written)
    self._reading.sort(key=lambda session: session.arrival)
    running = [*self._decoding, *self._reading]
    for sessions in _by_weights(running):
      for first in range(0, len(sessions), self._engine.decode_batch):
        self._start_dispatch(sessions[first : first + self._engine.decode_batch])
    self._decoding = [session for session in running if session.unread is None and session.turn.steps_left]
    self._reading = [session for session in running if session.unread is not None]

  def _start_dispatch(self, sessions: list[Session]) -> None:
    # A turn whose prompt ends in this dispatch is decoded by it.
    by_slot = {session.slot: session for session in sessions}
    pieces = self._engine.take_pieces([session.unread for session in sessions if session.unread is not None])
    for piece in pieces:
      session = by_slot[piece.extension.slot]
      _, session.unread = session.unread.split(piece.count)
      self._counters.prefilled_tokens += piece.count
    decoding = [session for session in sessions if session.unread is None]

    # As many steps as pay off, given how long each turn may still run; one if a prompt waits for the next dispatch.
    steps_left = np.array([session.turn.steps_left for session in decoding], np.int32)
    waits = len(decoding) < len(sessions)
    num_steps = 1 if waits else best_num_steps(steps_left, self._engine.config.decode_steps)
    lengths = {session.slot: session.written for session in decoding}
    dispatch = self._engine.decode(num_steps, lengths, sessions[0].weights, pieces)

    # Remember the turn of each row: when the dispatch is read, its slot may hold another session.
    turns = {session.slot: (session, session.turn) for session in decoding}
    rows = [(row, *turns[slot]) for row, slot in enumerate(dispatch.slots) if slot in turns]
    read = functools.partial(self._read_dispatch, dispatch, rows, by_slot)
    self._started.append(Started(self._ticks, read, frozenset(by_slot)))
    self._counters.dispatches += 1

    # A turn that surely ends in this dispatch frees its slot before the dispatch is read.
    for session in decoding:
      session.count_steps(num_steps)
      if not session.turn.steps_left and not session.turn.request.keep_slot:
        self._free_slot(session)

  def _read_next(self) -> None:
    self._started.popleft().read()

  def _read_started(self) -> None:
    while self._started:
      self._read_next()

  def _read_prefill(self, prefill: Prefill, by_slot: dict[int, Session]) -> None:
    for slot, start, experts in prefill.fetch():
      by_slot[slot].keep_experts(start, experts)

  def _read_dispatch(
    self, dispatch: Dispatch, rows: list[tuple[int, Session, Turn]], by_slot: dict[int, Session]
  ) -> None:
    if dispatch.prefill is not None:
      self._read_prefill(dispatch.prefill, by_slot)
    tokens, logprobs, emitted, overflow, experts = dispatch.fetch()
    if any(overflow[row] for row, _, _ in rows):
      raise RuntimeError("a slot overflowed its KV cache: the budgets of the scheduler and the engine disagree")
    counts = emitted.sum(axis=0)  # a row emits from its first step until its turn ends
    self._counters.steps += int(emitted.any(axis=1).sum())
    self._counters.sampled_tokens += int(counts.sum())

    # Each turn gets its tokens, unless it was released in the meantime.
    tokens, logprobs = tokens.T.tolist(), logprobs.T.tolist()
    for row, session, turn in rows:
      count = int(counts[row])
      if count and session.turn is turn:
        if experts is not None:
          session.keep_experts(len(session.token_ids) - 1, experts[:count, row])
        session.append(tokens[row][:count], logprobs[row][:count], dispatch.version)
        if turn.request.on_tokens is not None:
          turn.request.on_tokens(tokens[row][:count], logprobs[row][:count], dispatch.version)
        turn.request.on_sampled(dispatch.version)
        if turn.finished:
          self._finish(session)

  def _finish(self, session: Session) -> None:
    turn, session.turn = session.turn, None
    if session in self._decoding:
      self._decoding.remove(session)
    if turn.request.keep_slot:
      session.written = min(session.written, max(len(session.token_ids) - 1, 0))
      session.idle_since = self._ticks
    else:
      self._free_slot(session)
      self._sessions.pop(turn.request.session_id, None)
    turn.on_done(turn.completion(session.take_experts(self._engine.routed_shape)))

  def _free_slot(self, session: Session) -> None:
    if session.slot is not None:
      self._engine.release(session.slot)
      self._free.add(session.slot)
      session.slot = None


def _by_weights(sessions: Sequence[Session]) -> list[list[Session]]:
  """Parts sessions by the policy that they sample with, in order; the published one is `None`."""
  parts: dict[int, list[Session]] = {}
  for session in sessions:
    parts.setdefault(id(session.weights), []).append(session)
  return list(parts.values())


def _refusal(request: GenerateRequest, session: Session, total: int, engine: Engine) -> Exception | None:
  """Returns the error of a request that makes the session's context `total` tokens long; None for a sound one."""
  if session.turn is not None:
    return ValueError(f"session {request.session_id} has a running turn; wait for it first")
  context_length = engine.config.context_length
  problem = request_problem(request, engine.vocab_size)
  if problem is not None:
    return problem

  # A later turn may end a full context; a first prompt must leave room for an answer.
  if total == 0:
    return ConfigError("new_token_ids", "the prompt is empty.", "start with at least one token, for example BOS.")
  if (request.new_context or not session.token_ids) and total >= context_length:
    return ConfigError(
      "sampler.context_length",
      f"a prompt of {total} tokens leaves no room in a context of {context_length}.",
      "raise it or shorten the prompt.",
    )
  return None
