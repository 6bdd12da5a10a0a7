"""Programs that a real run still compiles after its start; each one stalls the run, for minutes with a large model."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

from sao_jax.benchmarks.scale import Scale
from sao_jax.benchmarks.timing import on_compilation
from sao_jax.config import RunConfig
from sao_jax.learner import placement
from sao_jax.report.metrics import read_metrics
from sao_jax.training import loop, phases, sft

SETTLED_STEPS = 3  # train steps until a run should have compiled all its programs


def recompilation(scale: Scale) -> dict[str, Any]:
  """Counts compilations, in all threads, between the dispatch of the third train step and that of the last one.

  Raises:
    RuntimeError: when the run ended early, for example by a signal; a count of 0 would mean nothing then.
  """
  compiled: list[tuple[int, str]] = []
  run = fit_to_devices(scale.run, len(placement.local_devices()))
  with tempfile.TemporaryDirectory() as workdir:
    sft.sft(run, workdir)  # its compilations do not count

    def note(name: str) -> None:
      # The loop writes a step's metrics right after it has dispatched the next step.
      steps_dispatched = len(read_metrics(workdir, "train")) + 1
      compiled.append((steps_dispatched, name))

    with on_compilation(note):
      result = loop.train(run, workdir)

    # A run that was cut short proves nothing.
    planned = phases.reinforcement_learning(run).steps
    if result.step != planned or planned <= SETTLED_STEPS:
      raise RuntimeError(f"the run made {result.step} train steps of {planned}: too few to count what it compiles late")
    lengths = [line["response_length_mean"] for line in read_metrics(workdir, "train")]

  late = [name for steps, name in compiled if SETTLED_STEPS <= steps < result.step]
  return {
    "train_steps": result.step,
    "shortest_mean_response": min(lengths),
    "longest_mean_response": max(lengths),
    "compiled_before_third_step": sum(steps < SETTLED_STEPS for steps, _ in compiled),
    "compiled_after_third_step": len(late),
    "late_programs": sorted(set(late)),
  }


def fit_to_devices(run: RunConfig, count: int) -> RunConfig:
  """Rounds the run's packed rows and slots up to multiples of the devices that share them."""
  round_up = lambda size: -(-size // count) * count
  rollout = dataclasses.replace(run.rollout, row_counts=tuple(map(round_up, run.rollout.row_counts)))
  sampler = dataclasses.replace(run.sampler, num_slots=round_up(run.sampler.num_slots))
  return dataclasses.replace(run, rollout=rollout, sampler=sampler)
