"""A crowd of agents, some of which drop connections and some of which are killed: every episode has its outcome."""

from __future__ import annotations

import pytest
from soak import gateway_load


@pytest.mark.parametrize("faults", [(), ("--dropped=0.2", "--killed=1")], ids=["polite", "faulty"])
def test_nothing_is_lost_in_a_crowd(faults):
  small = ["--episodes=12", "--turns=4", "--processes=3", "--delay=0.02", "--think_timeout=3", "--measure=0"]
  found = gateway_load.run(gateway_load.parser().parse_args([*small, *faults]))  # which checks the accounts
  failed = sum(found["failures"].values())
  assert found["with_reward"] + failed == 12 and found["cut"] == 0
  if not faults:
    assert failed == 0 and found["agents"] == {"episodes": 12, "requests": 48}
