"""The ledger: every submitted rollout stands in it, in one place, until it has an outcome.

An entry is a rollout without an outcome; an outcome is a counter. So at any moment
`submitted == sum of places + sum of outcomes`, and no rollout can be in two places.

Admission is the first of two stages of staleness control (the second is the buffer's): no more than
(eta + 1) * batch_size rollouts stand in the ledger, which is what the next eta + 1 train steps use. With eta = 0 a
rollout starts only when the weights of the previous step are published: the synchronous loop.

**Groups.** With `group_size` G every prompt is rolled out G times, as samples 0 ... G - 1, under consecutive rollout
ids; its group's number is the id of sample 0. A group enters, is handed out and leaves as a whole:

* It is admitted only when all G rollouts have room, and its rollouts start before those of any later prompt. So a group
  that was begun can always finish, however little capacity there is.
* A batch is made of complete groups, in the order in which they completed.
* When one rollout fails, is filtered or grows stale, its group ends: the rollouts that still run are cancelled, the
  finished ones leave, all of them counted under the same outcome with "group/" before the reason. The next prompt takes
  the place. Rolling the one sample out again instead would let the others age meanwhile, and would repeat for ever on a
  prompt that always fails; passing faults are retried within the rollout already (`rollout.environment_retries`).

A single rollout is a group of one, with nothing left to say.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sao_jax.config import RolloutConfig
from sao_jax.episode import BadPrompt, Prompt, PromptKey, Trajectory
from sao_jax.errors import ConfigError
from sao_jax.rollout.entries import Entry, Finished, LedgerState, Rollout
from sao_jax.rollout.outcomes import Outcome, Place, check_identity
from sao_jax.rollout.prompt_stream import PromptStream, draw_prompt


class Ledger:
  """Thread-safe. Nothing here takes time in proportion to tokens, and a prompt is drawn outside the lock.

  Attributes:
    limit: rollouts that may stand in it.
    group_size: rollouts of one prompt.
    lock: re-entrant; hold it to read or change several things as one.
    drawing: a lock that is held from before a prompt is drawn until it is submitted; taken before the other one.
    changed: condition on the lock, notified after every change that somebody may wait for.
    exhausted: whether the prompts have ended.
    on_capacity: called, under the lock, when rollouts leave; must not block.
    on_cancel: called, under the lock, with the id of a rollout that runs and whose outcome is known: it is to be
      stopped, and then reported once, by whichever of `finish`, `fail` and `abort` it has come to.
  """

  def __init__(self, batch_size: int, staleness: int, *, group_size: int = 1, in_rounds: bool = False):
    """Args:
    batch_size: trajectories per train step.
    staleness: eta, in train steps.
    group_size: rollouts per prompt.
    in_rounds: hand finished rollouts out only once all that may be under way have finished, in the order of their ids.
    """
    if batch_size < 1 or staleness < 0:
      raise ValueError(f"batch_size {batch_size} must be positive and staleness {staleness} not negative")
    if group_size < 1 or batch_size % group_size:
      raise ValueError(f"batch_size {batch_size} must be a multiple of group_size {group_size}")
    self.limit, self.group_size = (staleness + 1) * batch_size, group_size
    self.lock = threading.RLock()
    self.changed = threading.Condition(self.lock)
    self.drawing = threading.Lock()
    self.exhausted = False
    self.on_capacity: Callable[[], None] = lambda: None
    self.on_cancel: Callable[[int], None] = lambda rollout_id: None
    self._in_rounds = in_rounds

    self._entries: dict[int, Entry] = {}
    self._submitted, self._next_rollout_id = 0, 0
    self._outcomes: collections.Counter[Outcome] = collections.Counter()
    self._reasons: collections.Counter[str] = collections.Counter()

    # The rest are orders, sets and leftovers of rollout ids; what is true of a rollout stands in its entry.
    self._waiting: collections.deque[int] = collections.deque()  # in flight, to be started
    self._complete: list[int] = []  # groups that wait for the end of their round
    self._ready: collections.deque[int] = collections.deque()  # groups to be handed out, in order
    self._training: collections.deque[list[int]] = collections.deque()  # batches handed out
    self._cancelled: set[int] = set()  # they run, though their outcome is known
    self._aborted: dict[int, Rollout] = {}  # to be saved as in flight

  @classmethod
  def of(cls, config: RolloutConfig) -> Ledger:
    """The empty ledger of a rollout configuration."""
    return cls(
      config.batch_size, config.admission_staleness, group_size=config.group_size, in_rounds=config.deterministic
    )

  # Reading.

  @property
  def capacity(self) -> int:
    """Rollouts that may still enter.

    Equal to (eta + version + 1) * batch_size - accepted - running of a run that started at version 0, without a need to
    know either number, so that it is right after a restore at any version.
    """
    with self.lock:
      return self.limit - len(self._entries)

  @property
  def num_ready(self) -> int:
    """Trajectories that can be handed out."""
    with self.lock:
      return len(self._ready) * self.group_size

  @property
  def batches_in_training(self) -> int:
    """Batches that were handed out and are not done."""
    with self.lock:
      return len(self._training)

  @property
  def idle(self) -> bool:
    """Nothing is in flight, and nothing may start."""
    with self.lock:
      return (self.exhausted or self.capacity < self.group_size) and not self.count(Place.IN_FLIGHT)

  def count(self, place: Place) -> int:
    """Rollouts in one place."""
    with self.lock:
      return sum(entry.place is place for entry in self._entries.values())

  def counters(self) -> dict[str, int]:
    """`submitted`, every place and every outcome by name, and the reasons as "outcome/reason"."""
    with self.lock:
      places = collections.Counter(entry.place for entry in self._entries.values())
      return {
        "submitted": self._submitted,
        **{place.value: places[place] for place in Place},
        **{outcome.value: self._outcomes[outcome] for outcome in Outcome},
        Outcome.ABORTED.value: len(self._aborted),
        **self._reasons,
      }

  def buffered(self) -> dict[int, Finished]:
    """The finished rollouts in the buffer, those of incomplete groups too, by rollout id."""
    with self.lock:
      return {number: entry.finished for number, entry in self._entries.items() if entry.place is Place.BUFFERED}

  def complete_group(self, rollout_id: int) -> dict[int, Finished]:
    """The finished rollouts of the group that a rollout belongs to, by id; none while one of them is missing."""
    with self.lock:
      group = self._group(rollout_id)
      members = self._members(group) if self._is_complete(group) else ()
      return {number: self._entries[number].finished for number in members}

  def in_flight(self) -> dict[int, Entry]:
    """The rollouts in flight, by rollout id."""
    with self.lock:
      return {number: entry for number, entry in self._entries.items() if entry.place is Place.IN_FLIGHT}

  # The way of a rollout: submit, start, then finish, fail or abort; what is finished: hand_out, then done.

  def submit(self, *rollouts: Rollout) -> bool:
    """Enters the rollouts of one prompt as in flight, to be started; False, and nothing happens, without capacity."""
    with self.lock:
      if self.capacity < len(rollouts):
        return False
      for rollout in rollouts:
        if rollout.rollout_id in self._entries:
          raise RuntimeError(f"rollout {rollout.rollout_id} stands in the ledger already")
        self._entries[rollout.rollout_id] = Entry(Place.IN_FLIGHT, rollout)
        self._waiting.append(rollout.rollout_id)
      self._submitted += len(rollouts)
      return True

  def start(
    self, prompts: PromptStream, ready: Callable[[Rollout], bool] = lambda rollout: True, *, draw: bool = True
  ) -> Rollout | None:
    """Returns the next rollout to run: the first one that was submitted and is `ready`, else one of the next prompts.

    Returns None when none is ready, and there is no capacity or no prompt for another one. Those that are not ready
    wait; `draw=False` draws a prompt only where none waits. Raises BadPrompt for one that nobody can attempt: it is
    counted as skipped, and the next call goes on behind it.
    """
    # The source is asked without the lock, which the trainer needs: it may take its time, or hang.
    with self.drawing:
      while True:
        with self.lock:
          rollout = self._next_ready(ready)
          room = not self.exhausted and self.capacity >= self.group_size
          if rollout is not None or not room or (self._waiting and not draw):
            return rollout
        prompt = draw_prompt(prompts)
        with self.lock:
          self._submit_next(prompt)

  def finish(self, rollout_id: int, finished: Finished) -> bool:
    """Moves a rollout from flight into the buffer; False when its outcome was known before."""
    with self.lock:
      if self._was_cancelled(rollout_id):
        return False
      self._entry(rollout_id, Place.IN_FLIGHT)
      self._entries[rollout_id] = Entry(Place.BUFFERED, finished=finished)
      group = self._group(rollout_id)
      if self._is_complete(group):
        (self._complete if self._in_rounds else self._ready).append(group)
      self._note_change()
      return True

  def fail(self, rollout_id: int, outcome: Outcome, reason: str) -> list[Finished] | None:
    """Gives a rollout that has just ended, and its group, an outcome.

    Returns:
      The finished rollouts of its group that left the buffer; None when its outcome was known before.
    """
    with self.lock:
      if self._was_cancelled(rollout_id):
        return None
      self._entry(rollout_id, Place.IN_FLIGHT)
      return self._end_groups({rollout_id}, outcome, reason, over={rollout_id})

  def cancel(self, rollout_ids: Collection[int], outcome: Outcome, reason: str) -> list[Finished]:
    """Gives rollouts in flight or in the buffer, and their groups, an outcome.

    Returns:
      The finished rollouts that left the buffer.
    """
    with self.lock:
      for rollout_id in rollout_ids:
        self._entry(rollout_id, Place.IN_FLIGHT, Place.BUFFERED)
      return self._end_groups(rollout_ids, outcome, reason)

  def abort(self, rollout_id: int) -> bool:
    """Takes note that a rollout was cut because the loop stops: it is saved as in flight, to be rolled out again.

    Returns False when its outcome was known before.
    """
    with self.lock:
      if self._was_cancelled(rollout_id):
        return False
      self._aborted[rollout_id] = self._entry(rollout_id, Place.IN_FLIGHT).rollout
      del self._entries[rollout_id]
      self._left()
      return True

  def abort_waiting(self) -> None:
    """Aborts the rollouts that were submitted and not started."""
    with self.lock:
      while self._waiting:
        self.abort(self._waiting.popleft())

  def hand_out(self, count: int) -> list[Trajectory]:
    """Moves the groups that completed first, of `count` trajectories, into training; in the order of rollout ids."""
    with self.lock:
      if count % self.group_size or count > self.num_ready:
        wanted = f"{count} trajectories in groups of {self.group_size}"
        raise RuntimeError(f"{wanted} are wanted, {self.num_ready} are ready")

      groups = [self._ready.popleft() for _ in range(count // self.group_size)]
      batch = sorted(number for group in groups for number in self._members(group))
      for rollout_id in batch:
        self._entries[rollout_id].place = Place.IN_TRAINING
      self._training.append(batch)
      return [self._entries[rollout_id].finished.trajectory for rollout_id in batch]

  def take_back(self) -> None:
    """Undoes the last `hand_out`; its trajectories become the first again."""
    with self.lock:
      batch = self._training.pop()
      for rollout_id in batch:
        self._entries[rollout_id].place = Place.BUFFERED
      self._ready.extendleft(sorted({self._group(rollout_id) for rollout_id in batch}, reverse=True))

  def done(self, outcomes: Mapping[tuple[Outcome, str], int]) -> list[Finished]:
    """Ends the oldest batch in training, and returns it; `outcomes` says how many have which outcome, and why."""
    with self.lock:
      if sum(outcomes.values()) != len(self._training[0]):
        raise RuntimeError(f"a batch of {len(self._training[0])} cannot have the outcomes {outcomes}")
      batch = [self._entries.pop(rollout_id).finished for rollout_id in self._training.popleft()]
      for (outcome, reason), count in outcomes.items():
        self._count(outcome, reason, count)
      self._left()
      return batch

  # Saving and going on.

  def state(self) -> LedgerState:
    """Returns references, so that it is cheap; nothing that they lead to is ever changed.

    A batch in training is saved as buffered, since its step has not finished; what was aborted, as in flight.
    """
    with self.lock:
      # What to roll out again, and what is there.
      in_flight = {number: entry.rollout for number, entry in self.in_flight().items()}
      unfinished = sorted((self._aborted | in_flight).items())
      finished = self._finished_in_order()

      # The layout of checkpoints.
      intake = {
        "next_rollout_id": self._next_rollout_id,
        "group_size": self.group_size,
        "unfinished": [[number, list(rollout.prompt.key), rollout.prompt.data] for number, rollout in unfinished],
      }
      admission = {
        "submitted": self._submitted,
        "in_flight": len(unfinished),
        "buffered": len(finished),
        "outcomes": {outcome.value: count for outcome, count in self._outcomes.items()},
        "reasons": dict(self._reasons),
      }
      return LedgerState(intake, admission, [self._entries[number].finished.trajectory for number in finished])

  def restore(self, intake: dict[str, Any], admission: dict[str, Any], finished: Sequence[Finished]) -> None:
    """Replaces everything by a saved state: what was in flight starts again first, under its old ids.

    Raises:
      ConfigError: the state was made with another `rollout.group_size`.
      RuntimeError: the state is damaged.
    """
    saved = intake.get("group_size", 1)  # states from before there were groups do not say
    if saved != self.group_size:
      problem = f"the state that the run goes on from has groups of {saved}, not {self.group_size}"
      raise ConfigError("rollout.group_size", problem, "keep the size that the run began with")

    rollouts = [self._rollout(number, Prompt(PromptKey(*key), data)) for number, key, data in intake["unfinished"]]
    with self.lock:
      for leftover in (self._complete, self._ready, self._training, self._cancelled, self._aborted):
        leftover.clear()

      # The entries and the counters.
      self._entries = {rollout.rollout_id: Entry(Place.IN_FLIGHT, rollout) for rollout in rollouts}
      self._entries |= {one.trajectory.rollout_id: Entry(Place.BUFFERED, finished=one) for one in finished}
      self._outcomes = collections.Counter({Outcome(name): count for name, count in admission["outcomes"].items()})
      self._reasons = collections.Counter(admission["reasons"])
      self._submitted, self._next_rollout_id = admission["submitted"], intake["next_rollout_id"]
      self._check_restored(len(rollouts) + len(finished))

      # The orders: of starts by id, of groups by the last one of each that finished.
      self._waiting = collections.deque(rollout.rollout_id for rollout in rollouts)
      last = {self._group(one.trajectory.rollout_id): number for number, one in enumerate(finished)}
      self._ready.extend(group for group in sorted(last, key=last.__getitem__) if self._is_complete(group))
      self.changed.notify_all()

  def _check_restored(self, expected: int) -> None:
    """Checks the identity, and that no rollout of a group is missing."""
    check_identity(self.counters())
    groups = collections.Counter(map(self._group, self._entries))
    if len(self._entries) != expected or any(size != self.group_size for size in groups.values()):
      raise RuntimeError(f"the saved rollouts are not whole groups of {self.group_size}: {sorted(self._entries)}")

  # All of this under the lock.

  def _next_ready(self, ready: Callable[[Rollout], bool]) -> Rollout | None:
    for rollout_id in self._waiting:
      if ready(self._entries[rollout_id].rollout):
        self._waiting.remove(rollout_id)
        return self._entries[rollout_id].rollout
    return None

  def _submit_next(self, prompt: Prompt | BadPrompt | None) -> None:
    """Submits the next prompt, counts it as skipped, or notes that there is none."""
    if prompt is None:
      self.exhausted = True
      self._note_change()
      return
    first = self._next_rollout_id
    self._next_rollout_id += self.group_size
    if isinstance(prompt, BadPrompt):  # its rollouts are over before they begin
      self._submitted += self.group_size
      self._count(Outcome.SKIPPED_PROMPT, prompt.reason, self.group_size)
      raise prompt
    self.submit(*(self._rollout(number, prompt) for number in range(first, self._next_rollout_id)))

  def _rollout(self, rollout_id: int, prompt: Prompt) -> Rollout:
    return Rollout(rollout_id, prompt, sample=rollout_id % self.group_size)

  def _group(self, rollout_id: int) -> int:
    return rollout_id - rollout_id % self.group_size

  def _members(self, group: int) -> list[int]:
    """The rollouts of a group that stand in the ledger."""
    return [number for number in range(group, group + self.group_size) if number in self._entries]

  def _is_complete(self, group: int) -> bool:
    members = self._members(group)
    return len(members) == self.group_size and all(self._entries[m].place is Place.BUFFERED for m in members)

  def _entry(self, rollout_id: int, *places: Place) -> Entry:
    """Looks a rollout up that must be in one of `places`."""
    entry = self._entries.get(rollout_id)
    if entry is None or entry.place not in places:
      where = "not in the ledger" if entry is None else entry.place.value
      raise RuntimeError(f"rollout {rollout_id} is {where}, and should be {' or '.join(p.value for p in places)}")
    return entry

  def _was_cancelled(self, rollout_id: int) -> bool:
    """Returns whether a rollout that now reports was cancelled; forgets it, since it reports once."""
    cancelled = rollout_id in self._cancelled
    self._cancelled.discard(rollout_id)
    return cancelled

  def _note_change(self) -> None:
    """Tells those who wait; before that ends the round, if it is over."""
    if self._in_rounds and self.idle:  # all that may be there is there: timing has left no trace
      self._ready = collections.deque(sorted([*self._ready, *self._complete]))
      self._complete.clear()
    self.changed.notify_all()

  def _end_groups(
    self, rollout_ids: Collection[int], outcome: Outcome, reason: str, over: Collection[int] = ()
  ) -> list[Finished]:
    """Gives rollouts, and with them the others of their groups, an outcome; stops those that run and are not `over`."""
    removed, rollout_ids = [], set(rollout_ids)
    for group in sorted({self._group(rollout_id) for rollout_id in rollout_ids}):
      for orders in (self._ready, self._complete):
        if group in orders:
          orders.remove(group)

      # Every one of the group gets the outcome, wherever it is.
      for rollout_id in range(group, group + self.group_size):
        entry = self._entries.pop(rollout_id, None)
        if entry is None and self._aborted.pop(rollout_id, None) is None:
          raise RuntimeError(f"rollout {rollout_id} of group {group} has an outcome already")
        self._count(outcome, reason if rollout_id in rollout_ids else f"group/{reason}")
        if entry is None:
          continue

        # What has a trajectory leaves the buffer; what waits is never started; what runs has to be stopped.
        if entry.finished is not None:
          removed.append(entry.finished)
        elif rollout_id in self._waiting:
          self._waiting.remove(rollout_id)
        elif rollout_id not in over:
          self._cancelled.add(rollout_id)
          self.on_cancel(rollout_id)
    self._left()
    return removed

  def _count(self, outcome: Outcome, reason: str, count: int = 1) -> None:
    self._outcomes[outcome] += count
    if reason:
      self._reasons[f"{outcome.value}/{reason}"] += count

  def _left(self) -> None:
    """Tells that rollouts have left."""
    self._note_change()
    self.on_capacity()

  def _finished_in_order(self) -> list[int]:
    """The finished rollouts: batches in training, groups that are ready, the others."""
    ordered = [number for batch in self._training for number in batch]
    ordered += [number for group in (*self._ready, *self._complete) for number in self._members(group)]
    known = set(ordered)
    rest = (number for number, entry in self._entries.items() if entry.finished is not None and number not in known)
    return ordered + sorted(rest)
