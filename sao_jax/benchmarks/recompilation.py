"""Programs that a real run still compiles after its start: each of them stalls it, a large model's for minutes."""

from __future__ import annotations

import tempfile
from typing import Any

from sao_jax.benchmarks.scale import Scale
from sao_jax.benchmarks.timing import on_compilation
from sao_jax.training import loop, phases, sft
from sao_jax.training.metrics import read_metrics

SETTLED_STEPS = 3


def recompilation(scale: Scale) -> dict[str, Any]:
  """Counts compilations, in all threads, between the dispatch of the third train step and that of the last one.

  Raises:
    RuntimeError: the run ended early, for example by a signal; that nothing was compiled late would mean nothing then.
  """
  compiled: list[tuple[int, str]] = []
  with tempfile.TemporaryDirectory() as workdir:
    sft.sft(scale.run, workdir)

    def note(name: str) -> None:
      # The loop writes a step's metrics right after it has dispatched the next step.
      steps_dispatched = len(read_metrics(workdir, "train")) + 1
      compiled.append((steps_dispatched, name))

    with on_compilation(note):
      result = loop.train(scale.run, workdir)
    planned = phases.reinforcement_learning(scale.run).steps
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
