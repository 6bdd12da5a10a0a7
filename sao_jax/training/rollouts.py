"""The rollout side of a run: prompts, buffer, admission and loop put together, and its numbers per train step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.episode import Trajectory
from sao_jax.interrupt import Interrupt
from sao_jax.learner.batches import Batch, packed_batch, replayed_routing
from sao_jax.learner.setup import Learner
from sao_jax.parallel.process import data_process_count, data_process_index
from sao_jax.rollout.admission import AdmissionControl, Place
from sao_jax.rollout.buffer import TrajectoryBuffer
from sao_jax.rollout.outcomes import Outcome
from sao_jax.rollout.rollout_loop import RolloutLoop
from sao_jax.sampler.service import SamplerService
from sao_jax.training.phases import prompt_seed

POLL = 0.5  # seconds between two looks at a requested interruption while the trainer waits for a batch


def make_rollout_loop(learner: Learner, service: SamplerService, phase: str, version: int) -> RolloutLoop:
  """The asynchronous loop of this process, not started, on its share of the training prompts.

  Its buffer hands out packed rows on the learner's mesh, see `batches.Batch`.
  """
  config = learner.config
  rollout = config.rollout
  tokenizer = config.environment.tokenizer()
  source = config.environment.prompts(tokenizer, "train", config.training.seed)
  buffer = TrajectoryBuffer(
    AdmissionControl(rollout.batch_size, rollout.admission_staleness),
    max_staleness=rollout.max_staleness,
    staleness=rollout.staleness,
    train_truncated=config.algorithm.truncation != "mask",
    routing=replayed_routing(config),
    version=version,
    make_batch=functools.partial(packed_batch, learner),
  )
  return RolloutLoop(
    lambda: config.environment.make(tokenizer),
    make_prompt_iterator(source, seed=prompt_seed(config, phase), shard=(data_process_index(), data_process_count())),
    service,
    buffer,
    rollout,
    context_length=config.sampler.context_length,
    vocab_size=config.model.vocab_size,
    max_in_flight=rollout.max_in_flight or config.sampler.num_slots,
    temperature=config.sampler.temperature,
    watchdog_seconds=config.training.watchdog_seconds,
  )


def take(
  rollouts: RolloutLoop, batch_size: int, version: int, interrupt: Interrupt, look: Callable[[], None] = lambda: None
) -> Batch | None:
  """Waits for a batch; None once an interruption was requested. Raises what stopped the rollout side, as itself.

  `look` is called now and then meanwhile, and may raise.
  """
  while not interrupt.requested:
    look()
    rollouts.check()
    try:
      return rollouts.take(batch_size, version, timeout=POLL)
    except TimeoutError:
      rollouts.check()  # a TimeoutError of the rollout side itself is not ours to swallow
  return None


class StepMetrics:
  """Host-side numbers of each train step, from the loop's running sums."""

  def __init__(self, rollouts: RolloutLoop):
    self._rollouts, self._before, self._began = rollouts, rollouts.stats(), time.monotonic()

  def read(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The numbers since the last call; call it once per step, with the step's trajectories."""
    stats, now = self._rollouts.stats(), time.monotonic()
    since = {
      name: stats[name] - self._before[name] for name in ("trainer_wait_seconds", "busy_slot_seconds", "slot_seconds")
    }
    seconds = max(now - self._began, 1e-9)
    metrics = {
      "step_seconds": seconds,
      "trainer_idle_fraction": since["trainer_wait_seconds"] / seconds,
      "slot_idle_fraction": 1.0 - since["busy_slot_seconds"] / max(since["slot_seconds"], 1e-9),
      "response_length_mean": float(np.mean([t.num_sampled for t in trajectories])),
      "turns_mean": float(np.mean([len(t.turn_starts) for t in trajectories])),
      "truncated_fraction": float(np.mean([t.status.truncated for t in trajectories])),
      "latency_mean": float(np.mean([t.info.get("latency", 0.0) for t in trajectories])),
    }
    # `stats` has checked that the first of these is the sum of the others.
    metrics |= {f"rollouts_{name}": stats[name] for name in ("submitted", *(part.value for part in (*Place, *Outcome)))}
    metrics["rollouts_by_reason"] = {name: count for name, count in stats.items() if "/" in name}
    over_the_run = ("mean_generated_latency", "mean_used_latency", "masked_tokens", "retries", "drop_rate_by_length")
    metrics |= {name: stats[name] for name in over_the_run} | {"event_loop_gap": stats["max_event_loop_gap"]}
    self._before, self._began = stats, now
    return metrics
