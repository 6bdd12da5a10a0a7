"""The costs of a run: its time on this machine, and what another machine would have to do as well."""

from __future__ import annotations

import os
import pathlib
from typing import NamedTuple

from sao_jax.report.metrics import metric_lines


class Costs(NamedTuple):
  """Costs of the training phase, as its metrics tell.

  Attributes:
    updates: policy updates.
    trajectories: trained on.
    sampled_tokens: in those trajectories.
    tokens: of all their rows' segments, prompts and observations included.
    seconds: on the clock, across resumes.
    tokens_per_second: sampled ones.
    lag_mean: policy versions between sampling and training, mean over steps.
    rejected: share of tokens that the loss took out, mean over steps.
  """

  updates: int
  trajectories: int
  sampled_tokens: int
  tokens: int
  seconds: float
  tokens_per_second: float
  lag_mean: float
  rejected: float


def costs_of(workdir: str | os.PathLike) -> Costs:
  """Adds up the metric lines of a run, of which every step must have one (`training.log_every=1`)."""
  lines = [line for line in metric_lines(pathlib.Path(workdir), "train") if "step_seconds" in line]
  total = lambda name: sum(line.get(name) or 0 for line in lines)
  mean = lambda *names: _mean([sum(line.get(name) or 0.0 for name in names) for line in lines])

  # The clock of a phase goes on across resumes.
  seconds = max((line["seconds"] for line in lines), default=0.0)
  sampled = int(total("num_sampled_tokens"))
  return Costs(
    updates=max((int(line["policy_version"]) for line in lines if line.get("policy_version") is not None), default=0),
    trajectories=int(total("num_trajectories")),
    sampled_tokens=sampled,
    tokens=int(total("num_tokens")),
    seconds=seconds,
    tokens_per_second=sampled / seconds if seconds else 0.0,
    lag_mean=mean("lag_mean"),
    rejected=mean("rejected_low", "rejected_high"),
  )


def _mean(values: list[float]) -> float:
  return sum(values) / len(values) if values else 0.0
