"""The host state of a phase, divided over other processes than those that saved it."""

from __future__ import annotations

import numpy as np
from toys.rollout_fakes import make_trajectory

from sao_jax.checkpoints import host_state
from sao_jax.parallel.process import DataShare
from sao_jax.rollout.serialization import trajectories_from_state, trajectories_to_state
from sao_jax.training import host_shares


def saved(numbers):
  """The state of an `Experience` whose store has these rollouts, oldest first."""
  records, arrays = trajectories_to_state([make_trajectory(number) for number in numbers])
  return {"rollouts": [{"rollouts": {}, "store": records, "demonstrations": None}, {"rollouts": {}, "store": arrays}]}


def stored(states, share, monkeypatch):
  """The rollouts in the store of one of the new processes."""
  monkeypatch.setattr(host_shares, "reshare_rollouts", lambda *_: ({}, {}))
  state, arrays = host_shares.share_host_state(states, share)["rollouts"]
  return [each.rollout_id for each in trajectories_from_state(state["store"], arrays["store"])]


def test_what_is_newest_in_a_store_stays_newest(monkeypatch):
  """A smaller store keeps the last ones: those must be the newest of all processes, and not all of the last one's."""
  states = [saved([1, 2, 3]), saved([11, 12, 13])]
  together = stored(states, DataShare(0, 1), monkeypatch)
  assert set(together[-2:]) == {3, 13} and set(together[:2]) == {1, 11} and len(together) == 6
  uneven = stored([saved([1, 2, 3]), saved([11])], DataShare(0, 1), monkeypatch)
  assert uneven[:2] == [1, 2] and set(uneven[2:]) == {3, 11}
  shares = [stored(states, DataShare(index, 3), monkeypatch) for index in range(3)]
  assert sorted(sum(shares, [])) == sorted(together) and [len(each) for each in shares] == [2, 2, 2]


def test_who_brings_no_share_takes_what_is_the_same_for_all():
  states = [saved([1]) | {"policy_version": 7}, saved([2]) | {"policy_version": 7}]
  assert host_shares.share_host_state(states, DataShare(None, 1))["policy_version"] == 7


def test_the_host_state_of_a_share_is_read_by_number_and_by_who_has_none(tmp_path):
  handler, archive = host_state.HostStateHandler(), host_state.encode({"a": np.arange(2)})
  handler.save(tmp_path, host_state.HostStateSave(archive, DataShare(0, 2)))
  handler.save(tmp_path, host_state.HostStateSave(host_state.encode({"b": 1}), DataShare(1, 2)))
  handler.save(tmp_path, host_state.HostStateSave(b"nothing", DataShare(None, 2)))
  assert sorted(path.name for path in tmp_path.iterdir()) == ["process_0.npz", "process_1.npz"]

  read = lambda share: handler.restore(tmp_path, host_state.HostStateRestore(share))
  assert read(DataShare(1, 2)) == {"b": 1}
  assert read(DataShare(None, 2)).keys() == read(DataShare(0, 2)).keys() == {"a"}
  assert len(read(DataShare(None, 1)).states) == 2 and len(read(DataShare(2, 3)).states) == 2
