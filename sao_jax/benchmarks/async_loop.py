"""The real rollout loop with a sleeping trainer and sleeping environments, and its episodes for the event model.

Loop, buffer, admission and prompts are put together and used as in training; only sampler, environments and train step
are replaced by waits. The difference between a run and the event model is therefore the cost of the loop itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from sao_jax.benchmarks.event_model import Episode, LoopRecord, LoopSettings
from sao_jax.benchmarks.sleeping import InstantSampler, Sleeping
from sao_jax.config import RolloutConfig
from sao_jax.data.prompts import PromptIterator, make_prompt_iterator
from sao_jax.interrupt import Interrupt
from sao_jax.rollout.admission import AdmissionControl
from sao_jax.rollout.buffer import TrajectoryBuffer
from sao_jax.rollout.rollout_loop import RolloutLoop
from sao_jax.training.rollouts import StepMetrics, take


def make_loop(settings: LoopSettings, environment: Sleeping, sampler: InstantSampler) -> RolloutLoop:
  """Makes the loop, not started; an episode that fails is replaced by another one, not tried again."""
  config = RolloutConfig(
    batch_size=settings.batch_size,
    admission_staleness=settings.admission_staleness,
    max_staleness=settings.max_staleness,
    environment_timeout=settings.timeout,
    environment_retries=0,
  )

  # Put together as in training, but for the sampler and the environments.
  tokenizer = environment.tokenizer()
  return RolloutLoop(
    lambda: environment.make(tokenizer),
    _prompts(environment),
    sampler,
    TrajectoryBuffer(
      AdmissionControl(settings.batch_size, settings.admission_staleness), max_staleness=settings.max_staleness
    ),
    config,
    context_length=2,  # the prompt, the action
    vocab_size=tokenizer.vocab_size,
    max_in_flight=settings.slots,
  )


def run_loop(settings: LoopSettings, environment: Sleeping) -> LoopRecord:
  """Runs the loop for `settings.steps` train steps.

  A trajectory's lag is that of its oldest sampled token, which here is sampled when the episode starts.
  """
  sampler, interrupt = InstantSampler(), Interrupt()
  rollouts = make_loop(settings, environment, sampler)
  lags, used = [], []
  began = time.monotonic()
  rollouts.start()

  try:
    metrics = StepMetrics(rollouts)
    for version in range(settings.steps):
      # The train step is a wait; the host reads its metrics meanwhile, as in training.
      batch = take(rollouts, settings.batch_size, version, interrupt)
      trained = time.monotonic() + settings.train_seconds
      lags += [version - trajectory.oldest_version for trajectory in batch]
      used += [trajectory.info["latency"] for trajectory in batch]
      metrics.read(batch)
      time.sleep(max(trained - time.monotonic(), 0.0))

      # Publish the next version.
      sampler.version = version + 1
      rollouts.on_version(version + 1)
    wall = time.monotonic() - began
    stats = rollouts.stats()
  finally:
    rollouts.stop()

  return LoopRecord(
    settings=settings,
    wall_seconds=wall,
    busy_slot_seconds=stats["busy_slot_seconds"],
    lags=np.asarray(lags, dtype=np.int64),
    generated=stats["generated"],
    dropped=stats["dropped_stale"],
    failed=stats["failed_environment"] + stats["failed_infrastructure"],
    generated_latency=stats["mean_generated_latency"],
    used_latency=float(np.mean(used)),
  )


def episodes(environment: Sleeping) -> Iterator[Episode]:
  """Lists the episodes of every run with these environments, in the order in which they start."""
  return (environment.episode(prompt.key) for prompt in _prompts(environment))


def event_loop_gap(environment: Sleeping) -> float:
  """Measures the longest silence of the loop's event loop during two episodes, in seconds beyond its heartbeat."""
  settings = LoopSettings(slots=2, admission_staleness=0, max_staleness=-1, train_seconds=0.0, batch_size=2, steps=1)
  rollouts = make_loop(settings, environment, InstantSampler())
  rollouts.start()
  try:
    take(rollouts, settings.batch_size, 0, Interrupt())
    return rollouts.stats()["max_event_loop_gap"]
  finally:
    rollouts.stop()


def _prompts(environment: Sleeping) -> PromptIterator:
  source = environment.prompts(environment.tokenizer(), "train", environment.seed)
  return make_prompt_iterator(source, seed=environment.seed)
