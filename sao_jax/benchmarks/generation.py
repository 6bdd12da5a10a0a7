"""The sampler against the machine's limit, and continuous batching against waiting for the slowest answer."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from sao_jax.benchmarks.peers import Peers, sampling_task
from sao_jax.benchmarks.scale import Scale
from sao_jax.benchmarks.timing import decode_flops, interleave, make_gemm, median_ratio
from sao_jax.config import ModelConfig, SamplerConfig
from sao_jax.learner import placement
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import init_params
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.requests import Completion, GenerateRequest
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService


def sampler(scale: Scale) -> dict[str, Any]:
  """Measures sampled tokens per second for several numbers of busy slots, and their share of the GEMM limit.

  Prefill and host work are included.
  """
  return {"dense": _sampler(scale, scale.dense), "moe": _sampler(scale, scale.moe)}


def _sampler(scale: Scale, config: ModelConfig) -> dict[str, Any]:
  # Time the matrix product and all numbers of slots in turn.
  gemm, gemm_flops = make_gemm(scale.gemm_size)
  lengths = [(scale.prompt_length, scale.answer_length)]
  context = scale.prompt_length + scale.answer_length
  with make_service(config, max(scale.slots), context) as service:
    busy = {
      str(slots): functools.partial(generate, service, make_requests(lengths * slots, config.vocab_size))
      for slots in scale.slots
    }
    seconds = interleave({"gemm": gemm} | busy, scale.rounds)

  # Share of the limit: FLOPs per second of the sampler over those of the matrix product, round by round.
  flops = decode_flops(config)
  result = {}
  for slots in scale.slots:
    tokens = slots * scale.answer_length
    share = tokens * flops / gemm_flops * median_ratio(seconds["gemm"], seconds[str(slots)])
    tokens_per_second = tokens / statistics.median(seconds[str(slots)])
    result[f"{slots}_slots"] = {"tokens_per_second": tokens_per_second, "share_of_gemm": share}
  return result | {"gemm_flops_per_second": gemm_flops / statistics.median(seconds["gemm"])}


def batching(scale: Scale, peers: Peers | None = None) -> dict[str, Any]:
  """Measures useful tokens per second with uneven answers, for two ways to fill the slots.

  Either every free slot is refilled at once, or waves of requests wait for their slowest one. Both ways run on the same
  engines, which leave finished slots out of their dispatches, so the ratio is the gain of refilling alone. For the
  waves, `waves_padded_tokens_per_second` counts every slot up to its wave's longest answer.

  With `peers` google-tunix's sampler takes the same waves in turn with ours.
  """
  return {"dense": _batching(scale, scale.dense, peers), "moe": _batching(scale, scale.moe, peers)}


def _batching(scale: Scale, config: ModelConfig, peers: Peers | None) -> dict[str, Any]:
  # The same requests for both ways.
  slots = scale.slots[-1]
  lengths = uneven_lengths(scale)
  requests = make_requests(lengths, config.vocab_size)
  waves = [requests[i : i + slots] for i in range(0, len(requests), slots)]

  # One service for both ways. The next wave starts when the last one has all its answers.
  with make_service(config, slots, scale.prompt_lengths[1] + scale.answer_maximum) as service, ExitStack() as stack:

    def in_waves() -> None:
      for wave in waves:
        generate(service, wave)

    ways: dict[str, Callable[[], object]] = {
      "continuous": functools.partial(generate, service, requests),
      "waves": in_waves,
    }
    if peers:
      task = sampling_task(scale, config, [lengths[i : i + slots] for i in range(0, len(lengths), slots)])
      ways["tunix"] = stack.enter_context(peers.start("tunix_sampling", task))
    seconds = interleave(ways, scale.rounds)

  # Useful tokens were asked for; padded ones also cover the time in which a slot waits for its wave.
  useful = sum(answer for _, answer in lengths)
  padded = sum(len(wave) * max(request.max_tokens for request in wave) for wave in waves)
  result = {
    "useful_tokens_per_second": useful / statistics.median(seconds["continuous"]),
    "waves_useful_tokens_per_second": useful / statistics.median(seconds["waves"]),
    "waves_padded_tokens_per_second": padded / statistics.median(seconds["waves"]),
    "continuous_over_waves": median_ratio(seconds["waves"], seconds["continuous"]),
  }
  if peers:
    result |= {
      "tunix_useful_tokens_per_second": useful / statistics.median(seconds["tunix"]),
      "useful_over_tunix": median_ratio(seconds["tunix"], seconds["continuous"]),
    }
  return result


def uneven_lengths(scale: Scale) -> list[tuple[int, int]]:
  """Draws the (prompt, answer) lengths of all requests: uniform prompts, heavy-tailed answers."""
  rng = np.random.default_rng(0)
  shortest, longest = scale.prompt_lengths
  prompts = rng.integers(shortest, longest + 1, scale.num_requests)
  answers = np.minimum(scale.answer_maximum, scale.answer_minimum * (1 + rng.pareto(1.5, scale.num_requests)))
  return [(int(prompt), int(answer)) for prompt, answer in zip(prompts, answers)]


def make_requests(lengths: Sequence[tuple[int, int]], vocab_size: int) -> list[GenerateRequest]:
  """Makes a request for every (prompt, answer) length, with random prompts; only the budget ends an answer."""
  rng = np.random.default_rng(1)
  return [
    GenerateRequest(i, i, rng.integers(0, vocab_size, prompt).astype(np.int32), max_tokens=answer)
    for i, (prompt, answer) in enumerate(lengths)
  ]


def make_service(config: ModelConfig, num_slots: int, context_length: int) -> SamplerService:
  """Makes a service with one engine per local device, which share the slots; random parameters, all compiled."""
  longest = 2 ** (context_length - 1).bit_length()
  devices = placement.local_devices()[:num_slots]
  params = init_params(param_specs(config), jax.random.key(0))

  # Slots that cannot be shared evenly go to the first engines.
  schedulers = []
  for index, device in enumerate(devices):
    sampler_config = SamplerConfig(
      num_slots=num_slots // len(devices) + (index < num_slots % len(devices)),
      context_length=context_length,
      prefill_buckets=(longest // 16, longest // 8, longest // 4),
      prefill_chunk=max(longest // 4, 1),
    )
    engine = Engine(jax.device_put(params, device), config, sampler_config, seed=0)
    engine.warm_up(prefixes=False)
    schedulers.append(Scheduler(engine))
  return SamplerService(*schedulers)


def generate(service: SamplerService, requests: Sequence[GenerateRequest]) -> list[Completion]:
  """Submits all requests at once and waits for every answer."""
  answers = [service.submit(request) for request in requests]
  return [answer.result() for answer in answers]
