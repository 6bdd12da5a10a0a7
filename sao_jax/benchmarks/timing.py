"""Timing of alternatives in turn, with a matrix product as the limit, and the FLOPs that the mathematics needs.

A machine's speed drifts (heat, neighbours), so no two figures of different minutes are compared: every ratio is taken
between calls that follow each other, and the median over the rounds is reported.

FLOPs are two per weight that a token meets in a matrix product. Attention scores, norms, softmax, the optimiser and
everything that is computed twice are left out, so a share of the machine's limit is never flattered.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from sao_jax.config import ModelConfig
from sao_jax.models.critic import critic_specs
from sao_jax.models.experts import EXPERT_WEIGHTS
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import Specs, path_name

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def interleave(alternatives: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
  """Times all alternatives in turn, in every round; returns the seconds of each, by round.

  A first round, which is not timed, compiles all programs.

  Args:
    alternatives: functions that return when their work is done, not when it is dispatched.
    rounds: number of timed rounds.

  Raises:
    RuntimeError: when something was compiled while it was timed.
  """
  for run in alternatives.values():
    run()

  # Round by round, so that all alternatives see the same drift of the machine.
  seconds: dict[str, list[float]] = {name: [] for name in alternatives}
  compiled: list[str] = []
  with on_compilation(compiled.append):
    for _ in range(rounds):
      for name, run in alternatives.items():
        start = time.perf_counter()
        run()
        seconds[name].append(time.perf_counter() - start)

  if compiled:
    raise RuntimeError(f"compiled while timed, so nothing can be said: {', '.join(compiled)}")
  return seconds


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
  """Computes the median over rounds of numerator / denominator, both taken in the same round."""
  return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


@contextlib.contextmanager
def on_compilation(callback: Callable[[str], object]) -> Iterator[None]:
  """Calls `callback(name of the program)` at every compilation in this process, reads from a compile cache included."""

  def listener(event: str, seconds: float, **details: str | int) -> None:
    del seconds
    if event == COMPILE_EVENT:
      callback(str(details.get("fun_name", "?")))

  jax.monitoring.register_event_duration_secs_listener(listener)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)


def make_gemm(size: int) -> tuple[Callable[[], object], float]:
  """Makes a square fp32 matrix product of this size, the machine's limit; returns it and its FLOPs."""
  matrix = jnp.full((size, size), 1.0 / size, jnp.float32)
  multiply = jax.jit(lambda a, b: a @ b)
  return lambda: jax.block_until_ready(multiply(matrix, matrix)), 2.0 * size**3


def matmul_weights(specs: Specs, config: ModelConfig) -> dict[str, float]:
  """Counts the weights of every matrix that one token meets, by name; of the experts, the active ones.

  The count holds for untied embeddings: the input embedding is looked up, not multiplied.
  """
  experts = {f"moe_layers/moe/{name}" for name in EXPERT_WEIGHTS}
  weights = {}
  for path, spec in jax.tree_util.tree_leaves_with_path(specs):
    name = path_name(path)
    if name != "embed" and not name.endswith("norm"):
      active = config.num_experts_per_token / config.num_experts if name in experts else 1.0
      weights[name] = math.prod(spec.shape) * active
  return weights


def decode_flops(config: ModelConfig) -> float:
  """Counts the FLOPs of one sampled token: a forward pass of the policy."""
  return 2.0 * sum(matmul_weights(param_specs(config), config).values())


def train_flops(config: ModelConfig, frozen: frozenset[str] = frozenset()) -> float:
  """Counts the FLOPs per token of one policy and one critic update.

  These are the forward pass, the gradients of the activations and the gradients of the weights. Frozen weights have no
  gradient, but the gradients of the activations still pass through them.
  """
  policy = matmul_weights(param_specs(config), config)
  critic = matmul_weights(critic_specs(config), config)
  without_gradient = sum(count for name, count in critic.items() if name in frozen)
  return 6.0 * (sum(policy.values()) + sum(critic.values())) - 2.0 * without_gradient
