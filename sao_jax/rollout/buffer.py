"""The trajectory buffer: first in, first out by completion, between the rollout thread and the trainer.

It never blocks its producer; what bounds it is admission. At consumption it holds the trainer to the staleness bound
tau: a trajectory beyond it is dropped, or its over-age tokens are masked, and its capacity is given back.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from sao_jax.episode import Trajectory
from sao_jax.rollout.admission import AdmissionControl, Place
from sao_jax.rollout.evidence import Routing, check_trajectory
from sao_jax.rollout.outcomes import BadEvidence, Outcome
from sao_jax.rollout.staleness import is_stale, mask_over_age, mask_truncated, token_lags
from sao_jax.rollout.statistics import RolloutStatistics

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Batch:
  """What one `take` handed out: as it was buffered, as it is trained on, and the version that the step updates."""

  original: list[Trajectory]
  used: list[Trajectory]
  version: int


def _outcome(used: Trajectory) -> tuple[Outcome, str]:
  """What a trajectory has become that a train step was given, and why."""
  if used.num_trained == used.num_sampled:
    return Outcome.TRAINED, ""
  return Outcome.MASKED, "over-age tokens" if used.num_trained else "all tokens"


class TrajectoryBuffer:
  """Thread-safe; shares the lock of its admission control, so that places and contents change as one.

  Attributes:
    admission: counts every trajectory's way.
    statistics: latencies, lags and waits; read it under `admission.lock`.
    version: the version that the next step updates, as far as the buffer was told.
  """

  def __init__(
    self,
    admission: AdmissionControl,
    *,
    max_staleness: int,
    staleness: Literal["drop", "mask"] = "drop",
    train_truncated: bool = True,
    routing: Routing | None = None,
    version: int = 0,
    make_batch: Callable[[list[Trajectory]], Any] = list,
    clock: Callable[[], float] = time.monotonic,
  ):
    """`make_batch` makes of its trajectories what `take` returns: in training, rows packed and sharded over the mesh.

    `max_staleness` is tau in policy versions, -1 for no bound; `staleness` is "drop" or "mask".

    `routing` says which experts a trajectory must bring along, None: none.

    Without `train_truncated` (`algorithm.truncation="mask"`), trajectories that were cut are handed out masked wholly.
    """
    self.admission, self.version = admission, version
    self.statistics = RolloutStatistics(clock)
    self._max_staleness, self._staleness, self._clock = max_staleness, staleness, clock
    self._train_truncated, self._routing, self._make_batch = train_truncated, routing, make_batch
    self._changed = threading.Condition(admission.lock)
    self._queue: collections.deque[Trajectory] = collections.deque()
    self._training: collections.deque[_Batch] = collections.deque()
    self._error: BaseException | None = None
    self._ended: BaseException | None = None

  def __len__(self) -> int:
    return len(self._queue)

  def put(self, trajectory: Trajectory) -> bool:
    """Takes over a finished rollout that was in flight; never waits for space.

    Returns False when it was over age already, and is dropped.

    Raises:
      BadEvidence: it cannot be trained on; it stays in flight, and the caller's to settle.
    """
    check_trajectory(trajectory, self._routing)
    with self._changed:
      self.statistics.generated(trajectory)
      if self._is_stale(trajectory):
        self._drop(trajectory, Place.IN_FLIGHT)
        return False
      self.admission.move(Place.IN_FLIGHT, Place.BUFFERED)
      self._queue.append(trajectory)
      self._changed.notify_all()
      return True

  def take(self, batch_size: int, version: int, timeout: float | None = None) -> Any:
    """Waits for the `batch_size` trajectories that finished first and may be trained on at `version`.

    They stay "in training", and hold their capacity, until `batch_done`.

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
    if not 1 <= batch_size <= self.admission.limit:
      raise ValueError(
        f"a batch of {batch_size} can never fill: admission lets {self.admission.limit} rollouts be under way"
      )
    began = self._clock()
    with self._changed:
      self._advance(version)
      self._changed.wait_for(lambda: self._over or len(self._queue) >= batch_size, timeout)
      self.statistics.add("trainer_wait_seconds", self._clock() - began)
      if self._error is not None:
        raise self._error
      if len(self._queue) < batch_size:
        if self._ended is not None:
          raise self._ended
        raise TimeoutError(
          f"{len(self._queue)} of {batch_size} trajectories after {timeout} s: {self.admission.counters()}"
        )
      original = sorted(itertools.islice(self._queue, batch_size), key=lambda t: t.rollout_id)
      used = [self._mask(trajectory, version) for trajectory in original]
      self._check_lags(used, version)  # before anything moves
      for _ in range(batch_size):
        self._queue.popleft()
      self.admission.move(Place.BUFFERED, Place.IN_TRAINING, batch_size)
      self._training.append(_Batch(original, used, version))
    return self._make_batch(used)  # not under the lock: the rollout side goes on

  def batch_done(self, version: int) -> None:
    """The oldest batch in training is trained on, and the parameters that it led to are published as `version`."""
    with self._changed:
      if not self._training:
        raise RuntimeError("no batch is in training")
      batch = self._training.popleft()
      for used in batch.used:
        self.statistics.used(used, batch.version, used.num_sampled - used.num_trained)
      self._advance(version)
      for (outcome, reason), count in collections.Counter(map(_outcome, batch.used)).items():
        self.admission.settle(Place.IN_TRAINING, outcome, reason, count)

  def set_version(self, version: int) -> None:
    """A new version was published without a batch (after a restore, for example)."""
    with self._changed:
      self._advance(version)

  def sort(self) -> None:
    """Puts the contents in the order of their rollout ids, where the order of completion is left to chance."""
    with self._changed:
      self._queue = collections.deque(sorted(self._queue, key=lambda trajectory: trajectory.rollout_id))

  def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
    """Waits for a condition on what the buffer and its admission control hold; False after `timeout` seconds."""
    with self._changed:
      return self._changed.wait_for(condition, timeout)

  def fail(self, error: BaseException) -> None:
    """From now on every `take` raises `error`; the first one stays."""
    with self._changed:
      self._error = error if self._error is None else self._error
      self._changed.notify_all()

  def end(self, reason: BaseException) -> None:
    """No further trajectory will come: a `take` that cannot be filled raises `reason`."""
    with self._changed:
      self._ended = reason if self._ended is None else self._ended
      self._changed.notify_all()

  def snapshot(self) -> tuple[dict[str, Any], list[Trajectory]]:
    """Returns (counters as JSON, contents). A batch in training comes back first: its step has not finished."""
    with self._changed:
      state = {
        "version": self.version,
        "admission": self.admission.state_dict(),
        "statistics": self.statistics.state_dict(),
      }
      return state, [t for batch in self._training for t in batch.original] + list(self._queue)

  def restore(self, state: dict[str, Any], trajectories: list[Trajectory]) -> None:
    """Replaces counters and contents by those of a snapshot; what lacks evidence that is wanted by now is filtered.

    Such are trajectories without routed experts in a run that goes on with `algorithm.router_replay`.
    """
    with self._changed:
      self.version = state["version"]
      self.admission.load_state_dict(state["admission"])
      self.statistics.load_state_dict(state["statistics"])
      self._queue.clear()
      self._training.clear()
      for trajectory in trajectories:
        try:
          check_trajectory(trajectory, self._routing)
        except BadEvidence as error:
          log.warning("buffered rollout %d is filtered: %s", trajectory.rollout_id, error)
          self.admission.settle(Place.BUFFERED, Outcome.FILTERED, error.reason)
        else:
          self._queue.append(trajectory)
      self._changed.notify_all()

  @property
  def _over(self) -> bool:
    return self._error is not None or self._ended is not None

  def _advance(self, version: int) -> None:
    if version < self.version:
      raise ValueError(f"policy version {version} after {self.version}: versions never go back")
    self.version = version
    kept = collections.deque(trajectory for trajectory in self._queue if not self._is_stale(trajectory))
    if len(kept) < len(self._queue):
      for trajectory in self._queue:
        if self._is_stale(trajectory):
          self._drop(trajectory, Place.BUFFERED)
      self._queue = kept

  def _is_stale(self, trajectory: Trajectory) -> bool:
    return is_stale(trajectory, self.version, self._max_staleness, self._staleness)

  def _mask(self, trajectory: Trajectory, version: int) -> Trajectory:
    trajectory = mask_over_age(trajectory, version, self._max_staleness)
    return trajectory if self._train_truncated else mask_truncated(trajectory)

  def _drop(self, trajectory: Trajectory, place: Place) -> None:
    self.statistics.dropped(trajectory)
    self.admission.settle(place, Outcome.DROPPED_STALE, f"older than {self._max_staleness} versions")

  def _check_lags(self, trajectories: list[Trajectory], version: int) -> None:
    lags = [int(token_lags(trajectory, version).max(initial=0)) for trajectory in trajectories]
    if 0 <= self._max_staleness < max(lags):
      raise RuntimeError(f"a token of lag {max(lags)} escaped the bound of {self._max_staleness}")
