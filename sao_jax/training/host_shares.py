"""The host state of a phase, divided anew when a run goes on with another number of processes that sample."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.parallel.process import DataShare
from sao_jax.rollout.resharing import reshare_rollouts
from sao_jax.rollout.serialization import trajectories_from_state, trajectories_to_state


def share_host_state(states: Sequence[Mapping[str, Any]], share: DataShare) -> dict[str, Any]:
  """Returns the host state of this process, made of those of all shares that were saved: see `Saver` and `sft`.

  Rollouts, stored trajectories and prompts are divided; what else there is (measurements, origins) is the same in all.
  A process without a share gets the first of them as it is: it has no use for the rest.
  """
  own = dict(states[0])
  if not share.brings:
    return own
  if "prompts" in own:
    own["prompts"] = {"shares": [state["prompts"] for state in states]}
  if "rollouts" in own:
    own["rollouts"] = _share_rollouts([state["rollouts"] for state in states], share)
  return own


def _share_rollouts(states: Sequence[Sequence[Any]], share: DataShare) -> list[Any]:
  """Divides (JSON, arrays) of `Rollouts`, or of `Experience`, which has a store besides."""
  index, count = share
  if "store" not in states[0][0]:
    return list(reshare_rollouts(states, index, count))

  # The rollouts inside.
  inner = [(state["rollouts"], arrays["rollouts"]) for state, arrays in states]
  rollouts, rollout_arrays = reshare_rollouts(inner, index, count)

  # The store: from the newest of every process to the oldest in turn, so that the newest stay the newest.
  stored = [reversed(trajectories_from_state(state["store"], arrays["store"])) for state, arrays in states]
  newest_first = [each for turn in itertools.zip_longest(*stored) for each in turn if each is not None]
  records, store_arrays = trajectories_to_state(newest_first[index::count][::-1])

  # The first course of demonstrations goes on where the processes were.
  shown = [state["demonstrations"] for state, _ in states]
  demonstrations = None if shown[0] is None else {"shares": shown}
  return [
    {"rollouts": rollouts, "store": records, "demonstrations": demonstrations},
    {"rollouts": rollout_arrays, "store": store_arrays},
  ]
