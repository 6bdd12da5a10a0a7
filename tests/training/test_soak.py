"""A short soak, so that the long one always can be run: launch/soak.sh."""

from __future__ import annotations

from soak import soak

from sao_jax.rollout.outcomes import Outcome


def test_a_run_among_faults_of_every_kind_goes_on_or_says_why_it_ended(tmp_path):
  events = (soak.outage, soak.second_process, soak.full_disk)
  result = soak.soak(120.0, tmp_path / "run", events, outage_seconds=1.0)
  assert {"outage", "second_process", "full_disk"} <= result["events"].keys()

  reasons = result["rollouts_by_reason"]
  for outcome in (Outcome.TRAINED, Outcome.SKIPPED_PROMPT, Outcome.FAILED_ENVIRONMENT, Outcome.FAILED_INFRASTRUCTURE):
    assert result[f"rollouts_{outcome.value}"] > 0
  assert reasons["failed_infrastructure/EnvironmentTimeout"] > 0
  assert reasons["failed_environment/UnexpectedFailure(Panic)"] > 0
