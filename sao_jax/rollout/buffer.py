"""The trajectory buffer: the trainer's side of the ledger, first in, first out by completion.

It never blocks its producer; what bounds it is the ledger's admission. At consumption it holds the trainer to the
staleness bound tau: a trajectory beyond it is dropped, or its over-age tokens are masked, and its capacity is given
back. A rollout that is certain to be dropped is cancelled while it is in flight.

Whatever reads tokens (checks, masks, lags) happens before or after the lock is held, never under it: a trajectory of a
hundred thousand tokens must not hold up the event loop, nor the trainer.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sao_jax.episode import PromptKey, Trajectory
from sao_jax.rollout.entries import Entry, Finished
from sao_jax.rollout.evidence import RequiredExperts, check_trajectory
from sao_jax.rollout.ledger import Ledger
from sao_jax.rollout.outcomes import BadEvidence, NothingButEqualGroups, Outcome
from sao_jax.rollout.running_mean import RunningMeans
from sao_jax.rollout.staleness import decisive_version, is_stale, mask_all, mask_over_age
from sao_jax.rollout.statistics import RolloutStatistics, Usage

log = logging.getLogger(__name__)

MOST_EQUAL = 10  # times what may be under way, of rollouts in groups of equal returns without another one between


class Snapshot(NamedTuple):
  """Everything that a buffer and its ledger hold, at one instant; nothing is copied yet.

  Attributes:
    intake: JSON: unfinished rollouts with their prompts.
    buffer: JSON: version, counters, statistics.
    trajectories: what is finished and not trained on. A batch in training comes first: its step has not finished.
  """

  intake: dict[str, Any]
  buffer: dict[str, Any]
  trajectories: list[Trajectory]


class _InTraining(NamedTuple):
  """A batch in training: what its tokens are, and the return of each of its prompts."""

  usage: Usage
  returns: list[tuple[PromptKey, float]]


class TrajectoryBuffer:
  """Thread-safe; shares the lock of its ledger, so that its statistics and the ledger's counters change as one.

  Attributes:
    ledger: knows where every rollout is, and what became of it.
    statistics: latencies, lags and waits; read it under `ledger.lock`.
    version: the version that the next step updates, as far as the buffer was told.
  """

  def __init__(
    self,
    ledger: Ledger,
    *,
    max_staleness: int,
    staleness: Literal["drop", "mask"] = "drop",
    train_truncated: bool = True,
    is_heldout: Callable[[PromptKey], bool] = lambda key: False,
    required_experts: RequiredExperts | None = None,
    longest_context: int | None = None,
    version: int = 0,
    make_batch: Callable[[list[Trajectory]], Any] = list,
    baselines: RunningMeans | None = None,
    filter_equal_groups: bool = False,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Args:
    ledger: of the rollouts.
    max_staleness: tau in policy versions, -1 for no bound.
    staleness: "drop" or "mask".
    train_truncated: False (`algorithm.truncation="mask"`) masks all tokens of trajectories that were cut.
    is_heldout: True for prompts whose trajectories are handed out with all tokens masked.
    required_experts: the experts that a trajectory must bring along; None: none.
    longest_context: tokens of a row, which must hold each context of a trajectory; None: any number.
    version: the policy version at the start.
    make_batch: makes of its trajectories what `take` returns: in training, rows packed and sharded over the mesh.
    baselines: gives every trajectory its `baseline` when it is taken, and learns its return when it was trained on.
    filter_equal_groups: filters groups of equal returns, which say nothing to those who compare within groups.
    clock: seconds.
    """
    self.ledger, self.version = ledger, version
    self.statistics = RolloutStatistics(clock)
    self._max_staleness, self._staleness, self._clock = max_staleness, staleness, clock
    self._train_truncated, self._is_heldout, self._make_batch = train_truncated, is_heldout, make_batch
    self._required_experts, self._longest_context = required_experts, longest_context
    self._baselines, self._filters_equal, self._equal_groups = baselines, filter_equal_groups, 0
    self._in_training: collections.deque[_InTraining] = collections.deque()  # one for every batch in training
    self._gone: list[Finished] = []  # left the buffer, and not freed yet
    self._error: BaseException | None = None
    self._ended: BaseException | None = None

  def __len__(self) -> int:
    """Trajectories that can be taken."""
    return self.ledger.num_ready

  def put(self, trajectory: Trajectory) -> bool:
    """Takes over a finished rollout that was in flight; never waits for space.

    Returns False when it was over age already, and is dropped, when it completes a group that is filtered, or when its
    outcome was known before.

    Raises:
      BadEvidence: it cannot be trained on; it stays in flight, and the caller's to give an outcome.
    """
    self._check(trajectory)
    finished = self._measure(trajectory)
    with self.ledger.lock:
      if trajectory.rollout_id in self.ledger.in_flight():  # else it was cancelled, and has been counted
        self.statistics.generated(trajectory, finished.num_sampled)
      if not self._is_stale(finished):
        return self.ledger.finish(trajectory.rollout_id, finished) and not self._filter_equal(trajectory.rollout_id)
      others = self.ledger.fail(trajectory.rollout_id, *self._stale())
      if others is not None:
        self._count_dropped([finished, *others])
      return False

  def note_oldest(self, rollout_id: int, version: int | None) -> None:
    """Notes the version of the first sampled token of a rollout in flight; None: an attempt begins. From any thread."""
    with self.ledger.lock:
      entry = self.ledger.in_flight().get(rollout_id)
      if entry is None:
        return  # its outcome is known already
      entry.oldest = version
      if version is None:
        entry.began = self._clock()
      self._cancel_doomed({rollout_id: entry})

  def take(self, batch_size: int, version: int, timeout: float | None = None) -> Any:
    """Waits for the `batch_size` trajectories that finished first and may be trained on at `version`.

    With groups: for the whole groups that were complete first. They stay "in training", and hold their capacity, until
    `batch_done`.

    Args:
      batch_size: trajectories; at most what admission lets be under way.
      version: version of the parameters that this step updates.
      timeout: seconds to wait; None for as long as it takes.

    Returns:
      What `make_batch` makes of the trajectories, which it gets in the order of their rollout ids.

    Raises:
      TimeoutError: too few came in time.
      Exception: what `fail` or `end` was told, as itself.
    """
    limit, group_size = self.ledger.limit, self.ledger.group_size
    if not 1 <= batch_size <= limit:
      raise ValueError(f"a batch of {batch_size} can never fill: admission lets {limit} rollouts be under way")
    if batch_size % group_size:
      raise ValueError(f"a batch of {batch_size} is not made of whole groups of {group_size}")

    # Wait, and choose.
    began = self._clock()
    with self.ledger.lock:
      self._advance(version)
      self.ledger.changed.wait_for(lambda: self._over or len(self) >= batch_size, timeout)
      self.statistics.add("trainer_wait_seconds", self._clock() - began)
      if self._error is not None:
        raise self._error
      if len(self) < batch_size:
        if self._ended is not None:
          raise self._ended
        raise TimeoutError(f"{len(self)} of {batch_size} trajectories after {timeout} s: {self.ledger.counters()}")
      original = self.ledger.hand_out(batch_size)

    # Everything in proportion to tokens comes after the lock: the rollout side goes on.
    self.free()
    try:
      used = [self._with_baseline(self._mask(trajectory, version)) for trajectory in original]
      usage = self._use(used, version)
    except BaseException:
      self.ledger.take_back()
      raise
    self._in_training.append(_InTraining(usage, [(trajectory.key, trajectory.reward) for trajectory in used]))
    return self._make_batch(used)

  def free(self) -> None:
    """Frees what has left; call it without the lock, since giving memory back takes time in proportion to tokens."""
    with self.ledger.lock:
      gone, self._gone = self._gone, []
    del gone

  def batch_done(self, version: int) -> list[Trajectory]:
    """The oldest batch in training is trained on, and the parameters that it led to are published as `version`.

    Returns:
      The batch, as it was sampled, in the order of rollout ids.
    """
    with self.ledger.lock:
      if not self._in_training:
        raise RuntimeError("no batch is in training")
      usage, returns = self._in_training.popleft()
      if self._baselines is not None:
        self._baselines.add(returns)
      self.statistics.used(usage)
      self._advance(version)
      batch = self.ledger.done(usage.outcomes)
      self._gone += batch
      return [finished.trajectory for finished in batch]

  def set_version(self, version: int) -> None:
    """A new version was published without a batch (after a restore, for example)."""
    with self.ledger.lock:
      self._advance(version)

  def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
    """Waits for a condition on what the buffer and its ledger hold; False after `timeout` seconds."""
    with self.ledger.lock:
      return self.ledger.changed.wait_for(condition, timeout)

  def fail(self, error: BaseException) -> None:
    """From now on every `take` raises `error`; the first one stays."""
    with self.ledger.lock:
      self._error = error if self._error is None else self._error
      self.ledger.changed.notify_all()

  def end(self, reason: BaseException) -> None:
    """No further trajectory will come: a `take` that cannot be filled raises `reason`."""
    with self.ledger.lock:
      self._ended = reason if self._ended is None else self._ended
      self.ledger.changed.notify_all()

  def snapshot(self) -> Snapshot:
    """Everything at this instant, by reference: cheap, and safe to copy afterwards without the lock."""
    with self.ledger.lock:
      intake, admission, trajectories = self.ledger.state()
      state = {"version": self.version, "admission": admission, "statistics": self.statistics.state_dict()}
      if self._baselines is not None:
        state["baselines"] = self._baselines.state_dict()
      return Snapshot(intake, state, trajectories)

  def restore(self, snapshot: Snapshot) -> None:
    """Replaces everything by a snapshot; trajectories that this run cannot train on are filtered.

    For example those without routed experts, in a run that goes on with `algorithm.router_replay`, or with a context
    longer than its rows.
    """
    finished, filtered = [], {}
    for trajectory in snapshot.trajectories:
      finished.append(self._measure(trajectory))
      try:
        self._check(trajectory)
      except BadEvidence as error:
        log.warning("buffered rollout %d is filtered: %s", trajectory.rollout_id, error)
        filtered.setdefault(error.reason, set()).add(trajectory.rollout_id)

    state = snapshot.buffer
    with self.ledger.lock:
      self.version = state["version"]
      self.statistics.load_state_dict(state["statistics"])
      if self._baselines is not None:
        self._baselines.load_state_dict(state.get("baselines", ()))  # states of another estimator have none
      self._in_training.clear()
      self.ledger.restore(snapshot.intake, state["admission"], finished)
      for reason, rollout_ids in filtered.items():
        still_there = rollout_ids & self.ledger.buffered().keys()  # another one of the group may have been filtered
        self.ledger.cancel(still_there, Outcome.FILTERED, reason)

  @property
  def _over(self) -> bool:
    return self._error is not None or self._ended is not None

  def _advance(self, version: int) -> None:
    """Under the lock: goes to a version, and drops what is over age by then."""
    if version < self.version:
      raise ValueError(f"policy version {version} after {self.version}: versions never go back")
    self.version = version
    stale = [number for number, finished in self.ledger.buffered().items() if self._is_stale(finished)]
    if stale:
      self._count_dropped(self.ledger.cancel(stale, *self._stale()))
    self._cancel_doomed(self.ledger.in_flight())

  def _cancel_doomed(self, in_flight: Mapping[int, Entry]) -> None:
    """Under the lock: cancels what would be dropped for its age even if it finished at once.

    With "mask" that is never certain: a rollout in flight may yet sample tokens of the newest version.
    """
    if self._staleness != "drop":
      return
    known = {number: entry for number, entry in in_flight.items() if entry.oldest is not None}
    doomed = [n for n, entry in known.items() if is_stale(entry.oldest, self.version, self._max_staleness)]
    if doomed:
      for number in doomed:
        self.statistics.cancelled(self._clock() - known[number].began)
      outcome, reason = self._stale()
      self._count_dropped(self.ledger.cancel(doomed, outcome, f"in flight, {reason}"))

  def _check(self, trajectory: Trajectory) -> None:
    check_trajectory(trajectory, self._required_experts, self._longest_context)

  def _measure(self, trajectory: Trajectory) -> Finished:
    return Finished(trajectory, trajectory.num_sampled, decisive_version(trajectory, self._staleness))

  def _is_stale(self, finished: Finished) -> bool:
    return is_stale(finished.version, self.version, self._max_staleness)

  def _stale(self) -> tuple[Outcome, str]:
    return Outcome.DROPPED_STALE, f"older than {self._max_staleness} versions"

  def _count_dropped(self, dropped: Sequence[Finished]) -> None:
    self._gone += dropped
    for finished in dropped:
      self.statistics.dropped(finished.num_sampled)

  def _mask(self, trajectory: Trajectory, version: int) -> Trajectory:
    trajectory = mask_over_age(trajectory, version, self._max_staleness)
    cut = trajectory.status.truncated and not self._train_truncated
    return mask_all(trajectory) if cut or self._is_heldout(trajectory.key) else trajectory

  def _filter_equal(self, rollout_id: int) -> bool:
    """Under the lock: filters the group that a rollout has completed, if all of its returns are equal."""
    group = self.ledger.complete_group(rollout_id) if self._filters_equal else {}
    returns = {finished.trajectory.reward for finished in group.values()}
    if len(returns) != 1:
      self._equal_groups = 0 if group else self._equal_groups
      return False

    # Its place is free for the next prompt; the dispatch of others goes on.
    self._gone += self.ledger.cancel(group, Outcome.FILTERED, "equal returns")
    self._equal_groups += 1
    if self._equal_groups * len(group) >= MOST_EQUAL * self.ledger.limit:
      self.fail(NothingButEqualGroups(self._equal_groups, *returns))
    return True

  def _with_baseline(self, trajectory: Trajectory) -> Trajectory:
    if self._baselines is None:
      return trajectory
    return dataclasses.replace(trajectory, baseline=self._baselines.baseline(trajectory.key))

  def _use(self, trajectories: list[Trajectory], version: int) -> Usage:
    """Counts what a step is given, and checks that it keeps the bound."""
    usage = Usage.of(trajectories, version)
    oldest = max(usage.token_lags, default=0)
    if 0 <= self._max_staleness < oldest:
      raise RuntimeError(f"a token of lag {oldest} escaped the bound of {self._max_staleness}")
    return usage
