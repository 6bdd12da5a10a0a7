"""The numbers of several processes as one."""

from __future__ import annotations

import math

from toys.shared_store import SharedStore, together

from sao_jax.parallel.agreement import ALONE
from sao_jax.training.process_metrics import reduced

OWN = [
  {
    "seconds": 10.0,
    "take_wait_seconds": 1.0,
    "tokens_per_second": 100.0,
    "rollouts_trained": 4,
    "rollouts_by_reason": {"failed_environment/timeout": 1},
    "run_masked_tokens": 3,
    "run_drop_rate_by_length": {8: 0.5},
    "response_length_mean": 6.0,
    "used_over_generated_latency": math.nan,
    "sampler_queued_turns": 1,
  },
  {
    "seconds": 12.0,
    "take_wait_seconds": 3.0,
    "tokens_per_second": 50.0,
    "rollouts_trained": 6,
    "rollouts_by_reason": {},
    "run_masked_tokens": 1,
    "run_drop_rate_by_length": {8: 0.0, 16: 1.0},
    "response_length_mean": 8.0,
    "used_over_generated_latency": 0.5,
    "sampler_queued_turns": 2,
  },
]


def test_sums_maxima_and_means():
  writer, other = together(SharedStore(), 2, lambda processes: reduced(processes, OWN[processes.index]))
  assert other == OWN[1]
  assert writer == {
    "seconds": 12.0,
    "take_wait_seconds": 2.0,
    "tokens_per_second": 150.0,
    "rollouts_trained": 10,
    "rollouts_by_reason": {"failed_environment/timeout": 1},
    "run_masked_tokens": 4,
    "run_drop_rate_by_length": {"8": 0.25, "16": 1.0},
    "response_length_mean": 7.0,
    "used_over_generated_latency": 0.5,
    "sampler_queued_turns": 3,
  }
  assert reduced(ALONE, OWN[0]) == OWN[0]
