"""Admission control: how many rollouts may be under way, and where every submitted rollout is.

The first of two stages of staleness control: in flight + buffered + in training <= (eta + 1) * batch_size, so that no
more is generated than the next eta + 1 train steps use. With eta = 0 a rollout starts only when the previous step's
weights are published: the synchronous loop.
"""

from __future__ import annotations

import collections
import enum
import threading
from collections.abc import Callable
from typing import Any

from sao_jax.rollout.outcomes import Outcome


class Place(enum.Enum):
  """Where a rollout without an outcome is."""

  IN_FLIGHT = "in_flight"
  BUFFERED = "buffered"
  IN_TRAINING = "in_training"


class AdmissionControl:
  """Counts rollouts; every change moves some from one place to another place or to an outcome, never anything else.

  Hence at any moment `submitted == sum of places + sum of outcomes`. Thread-safe.

  Attributes:
    lock: re-entrant; hold it to read or change several things as one.
    on_capacity: called, under the lock, when rollouts leave their places; must not block.
  """

  def __init__(self, batch_size: int, staleness: int):
    """`batch_size` trajectories per train step; `staleness` is eta, in train steps."""
    if batch_size < 1 or staleness < 0:
      raise ValueError(f"batch_size {batch_size} must be positive and staleness {staleness} not negative")
    self.limit = (staleness + 1) * batch_size
    self.lock = threading.RLock()
    self.on_capacity: Callable[[], None] = lambda: None
    self._submitted = 0
    self._places: collections.Counter[Place] = collections.Counter()
    self._outcomes: collections.Counter[Outcome] = collections.Counter()
    self._reasons: collections.Counter[str] = collections.Counter()

  @property
  def capacity(self) -> int:
    """Rollouts that may still start.

    Equal to (eta + version + 1) * batch_size - accepted - running of a run that started at version 0, without a need to
    know either number, so that it is right after a restore at any version.
    """
    with self.lock:
      return self.limit - sum(self._places.values())

  def count(self, place: Place) -> int:
    """Rollouts in one place."""
    with self.lock:
      return self._places[place]

  def submit(self) -> bool:
    """Counts one more rollout in flight, unless there is no capacity."""
    with self.lock:
      if self.capacity < 1:
        return False
      self._submitted += 1
      self._places[Place.IN_FLIGHT] += 1
      return True

  def move(self, origin: Place, destination: Place, count: int = 1) -> None:
    """Moves rollouts from one place to another."""
    with self.lock:
      self._leave(origin, count)
      self._places[destination] += count

  def settle(self, origin: Place, outcome: Outcome, reason: str = "", count: int = 1) -> None:
    """Moves rollouts from a place to their outcome; that gives their capacity back."""
    with self.lock:
      self._leave(origin, count)
      self._outcomes[outcome] += count
      if reason:
        self._reasons[f"{outcome.value}/{reason}"] += count
      self.on_capacity()

  def counters(self) -> dict[str, int]:
    """`submitted`, every place and every outcome by name, and the reasons as "outcome/reason"."""
    with self.lock:
      places = {place.value: self._places[place] for place in Place}
      outcomes = {outcome.value: self._outcomes[outcome] for outcome in Outcome}
      return {"submitted": self._submitted, **places, **outcomes, **self._reasons}

  def state_dict(self) -> dict[str, Any]:
    """JSON. What is in training is saved as buffered, since its step has not finished; what was aborted, as in flight.

    Whoever goes on from it starts as many rollouts again as `in_flight` says.
    """
    with self.lock:
      return {
        "submitted": self._submitted,
        "in_flight": self._places[Place.IN_FLIGHT] + self._outcomes[Outcome.ABORTED],
        "buffered": self._places[Place.BUFFERED] + self._places[Place.IN_TRAINING],
        "outcomes": {o.value: count for o, count in self._outcomes.items() if o is not Outcome.ABORTED},
        "reasons": dict(self._reasons),
      }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Replaces all counts by saved ones."""
    with self.lock:
      self._submitted = state["submitted"]
      self._places = collections.Counter(
        {Place.IN_FLIGHT: state["in_flight"], Place.BUFFERED: state["buffered"], Place.IN_TRAINING: 0}
      )
      self._outcomes = collections.Counter({Outcome(name): count for name, count in state["outcomes"].items()})
      self._reasons = collections.Counter(state["reasons"])

  def _leave(self, origin: Place, count: int) -> None:
    if not 0 <= count <= self._places[origin]:
      raise RuntimeError(f"{count} rollouts cannot leave {origin.value}, which holds {self._places[origin]}")
    self._places[origin] -= count


def check_identity(counters: dict[str, int]) -> None:
  """Checks `submitted == sum of places + sum of outcomes` in what `AdmissionControl.counters` returned.

  Raises:
    RuntimeError: a rollout was lost or counted twice.
  """
  parts = {item.value: counters[item.value] for item in (*Place, *Outcome)}
  if counters["submitted"] != sum(parts.values()) or min(parts.values()) < 0:
    raise RuntimeError(f"submitted {counters['submitted']} is not the sum of {parts}")
