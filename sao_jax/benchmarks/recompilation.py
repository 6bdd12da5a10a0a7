"""Programs that a real run still compiles after its start: each of them would stall it for seconds, or minutes."""

from __future__ import annotations

import tempfile
from typing import Any

from sao_jax.benchmarks.scale import Scale
from sao_jax.benchmarks.timing import on_compilation
from sao_jax.config import (
  AlgorithmConfig,
  ModelConfig,
  OptimizerConfig,
  RolloutConfig,
  RunConfig,
  SamplerConfig,
  SFTConfig,
  TrainingConfig,
)
from sao_jax.environments.calculator import Calculator
from sao_jax.training import loop, sft
from sao_jax.training.metrics import read_metrics

SETTLED_STEPS = 3


def small_run(scale: Scale) -> RunConfig:
  """Two-layer calculators whose answers are of uneven lengths, because they have only begun to imitate."""
  return RunConfig(
    name="recompilation",
    environment=Calculator(),
    model=ModelConfig(num_experts=4, d_ff_expert=32),
    algorithm=AlgorithmConfig(critic_warmup_steps=1),
    policy_optimizer=OptimizerConfig(learning_rate=3e-4),
    critic_optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=10.0),
    sampler=SamplerConfig(
      num_slots=32, context_length=96, decode_steps=4, prefill_buckets=(8, 16, 96), prefill_batch=8
    ),
    rollout=RolloutConfig(
      batch_size=16,
      admission_staleness=1,
      max_turns=6,
      max_tokens=64,
      max_tokens_per_turn=16,
      row_lengths=(96,),
      row_counts=(8, 16),
    ),
    sft=SFTConfig(
      steps=scale.imitation_steps, optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.0, warmup_steps=20)
    ),
    training=TrainingConfig(steps=scale.loop_steps - 1, checkpoint_every=2, audit=False),
  )


def recompilation(scale: Scale) -> dict[str, Any]:
  """Counts compilations, in all threads, between the dispatch of the third train step and that of the last one."""
  config = small_run(scale)
  compiled: list[tuple[int, str]] = []
  with tempfile.TemporaryDirectory() as workdir:
    sft.sft(config, workdir)

    def note(name: str) -> None:
      # The loop writes the metrics of a step right after it has dispatched the next one.
      compiled.append((len(read_metrics(workdir, "train")) + 1, name))

    with on_compilation(note):
      result = loop.train(config, workdir)
    lengths = [line["response_length_mean"] for line in read_metrics(workdir, "train")]
  late = [name for step, name in compiled if SETTLED_STEPS <= step < result.step]
  return {
    "train_steps": result.step,
    "response_length_shortest_batch": min(lengths),
    "response_length_longest_batch": max(lengths),
    "compiled_before_third_step": sum(step < SETTLED_STEPS for step, _ in compiled),
    "compiled_after_third_step": len(late),
    "late_programs": sorted(set(late)),
  }
