"""The set-up that the studies share: corridors of ten doors in the real asynchronous loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sao_jax.configuration.methods import METHODS

Fields = Mapping[str, Any]

CONFIG = "configs/corridor_10.py"

# 32 trajectories for each update; group methods have 8 prompts four times. Every answer of the environment takes a
# log-normal time, and four batches are under way beside the one in training: so tokens are about three updates old.
FIELDS: Fields = {
  "rollout.batch_size": 32,
  "rollout.row_lengths": (128,),
  "rollout.row_counts": (16,),
  "sft.batch_size": 32,
  "sft.steps": 600,
  "rollout.admission_staleness": 4,
  "rollout.max_staleness": -1,
  "environment.mean": 0.15,
  "environment.sigma": 1.0,
  "environment.tick": 0.05,
  "sampler.num_slots": 160,
  "sampler.decode_batch": 128,
  "sampler.prefill_batch": 64,
  "training.trackers": (),
  "training.keep_checkpoints": 1,
  "training.checkpoint_every": 10_000,
  "training.steps": 150,
  "evaluation.every": 75,
  "evaluation.prompts": 300,
}
GROUP_SIZE = 4
LEARNING_RATE = 1e-3  # the best of three for each of these methods: see learning_rates
COMPARED = ("sao", "sao_dis_only", "grpo_dis", "grpo", "vapo", "running_mean_global")


def method(name: str, **changes: Any) -> Fields:
  """Returns what a method sets here, with further fields whose dots are written as two underscores."""
  fields = dict(METHODS[name]) | {"policy_optimizer.learning_rate": LEARNING_RATE}
  if "rollout.group_size" in fields:
    fields["rollout.group_size"] = GROUP_SIZE
  return fields | {name.replace("__", "."): value for name, value in changes.items()}
