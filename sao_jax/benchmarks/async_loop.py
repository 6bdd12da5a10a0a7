"""The real rollout loop with a sleeping trainer and sleeping environments, and its episodes for the event model.

Loop, buffer, ledger and prompts are put together and used as in training; only sampler, environments and train step
are replaced by waits. So what a run lacks to the model is the loop's own doing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from sao_jax.benchmarks.sleeping import InstantSampler, Sleeping
from sao_jax.config import RolloutConfig
from sao_jax.data.prompts import PromptIterator, make_prompt_iterator
from sao_jax.interrupt import Interrupt
from sao_jax.rollout.buffer import TrajectoryBuffer
from sao_jax.rollout.event_model import Episode, LoopRecord, LoopSettings
from sao_jax.rollout.ledger import Ledger
from sao_jax.rollout.rollout_loop import RolloutLoop
from sao_jax.training.rollouts import Rollouts


def make_loop(settings: LoopSettings, environment: Sleeping, sampler: InstantSampler) -> RolloutLoop:
  """The loop, not started; an episode that fails is not tried again, but replaced."""
  config = RolloutConfig(
    batch_size=settings.batch_size,
    admission_staleness=settings.admission_staleness,
    max_staleness=settings.max_staleness,
    environment_timeout=settings.timeout,
    environment_retries=0,
  )
  tokenizer = environment.tokenizer()
  return RolloutLoop(
    lambda: environment.make(tokenizer),
    _prompts(environment),
    sampler,
    TrajectoryBuffer(Ledger.of(config), max_staleness=settings.max_staleness),
    config,
    context_length=2,  # the prompt, the action
    vocab_size=tokenizer.vocab_size,
    max_in_flight=settings.slots,
  )


def run_loop(
  settings: LoopSettings,
  environment: Sleeping,
  on_update: Callable[[float, float], None] = lambda begin, end: None,
) -> LoopRecord:
  """Runs the loop; lags are those of the oldest sampled token, which here is sampled when the episode starts.

  `on_update` is called after every train step with the times of its begin and its end, by `time.monotonic`.
  """
  sampler = InstantSampler()
  loop = make_loop(settings, environment, sampler)
  lags, used = [], []
  began = time.monotonic()
  with Rollouts(loop, settings.batch_size, Interrupt()) as rollouts:
    for version in range(settings.steps):
      batch = rollouts.take(version)

      # The train step: a wait, with the host's work while it is under way, as in training.
      taken = time.monotonic()
      trained = taken + settings.train_seconds
      lags += [version - trajectory.oldest_version for trajectory in batch]
      used += [trajectory.info["latency"] for trajectory in batch]
      rollouts.consumed(batch)
      time.sleep(max(trained - time.monotonic(), 0.0))

      # Its weights are published: the sampler only has to know their number.
      sampler.version = version + 1
      rollouts.end_step(version + 1)
      on_update(taken, time.monotonic())
    wall = time.monotonic() - began
    stats = loop.stats()

  return LoopRecord(
    settings=settings,
    wall_seconds=wall,
    busy_slot_seconds=stats["busy_slot_seconds"],
    lags=np.asarray(lags, dtype=np.int64),
    generated=stats["generated"],
    dropped=stats["dropped_stale"],
    failed=stats["failed_environment"] + stats["failed_infrastructure"],
    generated_latency=stats["mean_generated_latency"],
    whole_latency=float("nan"),  # nobody knows how long a cancelled one would have taken
    used_latency=float(np.mean(used)),
  )


def episodes(environment: Sleeping) -> Iterator[Episode]:
  """The episodes of every run with these environments, in the order in which they start."""
  return (environment.episode(prompt.key) for prompt in _prompts(environment))


def event_loop_gap(environment: Sleeping) -> float:
  """The longest silence of the loop's event loop, in seconds beyond its heartbeat, over two episodes side by side."""
  settings = LoopSettings(slots=2, admission_staleness=0, max_staleness=-1, train_seconds=0.0, batch_size=2, steps=1)
  loop = make_loop(settings, environment, InstantSampler())
  with Rollouts(loop, settings.batch_size, Interrupt()) as rollouts:
    rollouts.take(0)
    return loop.stats()["max_event_loop_gap"]


def _prompts(environment: Sleeping) -> PromptIterator:
  source = environment.prompts(environment.tokenizer(), "train", environment.seed)
  return make_prompt_iterator(source, seed=environment.seed)
