"""Train steps against the machine's limit, the cost of publishing beside them, and the cost of more experts."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from sao_jax.benchmarks.peers import Peers, training_task
from sao_jax.benchmarks.scale import Scale
from sao_jax.benchmarks.timing import interleave, make_gemm, median_ratio, train_flops
from sao_jax.config import AlgorithmConfig, MeshConfig, ModelConfig, RunConfig
from sao_jax.learner import placement, setup
from sao_jax.learner.packing import shard_batch
from sao_jax.models.critic import critic_params_from_policy
from sao_jax.models.moe import moe_feed_forward
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import ONE_DEVICE
from sao_jax.parallel.params import init_params
from sao_jax.parallel.publish import make_publish
from sao_jax.types import TrajectoryBatch

TRAINING_PEERS = ("tunix", "torch")


class Trainer:
  """One model in training on all local devices, always on the same batch: one critic and one policy update per step.

  Attributes:
    flops_per_token: FLOPs of a step per token, as `train_flops` counts them.
  """

  def __init__(self, scale: Scale, model: ModelConfig, *, freeze: bool):
    """Initialises policy and critic. `freeze` keeps the critic's attention fixed, as a run does by default."""
    algorithm = AlgorithmConfig(
      value_updates=1, advantage_values="pre", freeze_attention=freeze, micro_batches=scale.micro_batches
    )
    data_parallel = MeshConfig(data=-1, fsdp=1)
    run = RunConfig(environment=None, model=model, algorithm=algorithm, mesh=data_parallel)
    learner = setup.make_learner(run, sharing_devices(scale.rows // scale.micro_batches))
    policy = setup.init_policy_params(learner, seed=0)
    self.flops_per_token = train_flops(model, learner.critic.frozen)
    self._state = setup.make_state(learner, policy, critic_params_from_policy(policy, model))
    self._batch = shard_batch(full_batch(scale, model.vocab_size), learner.layout)
    self._publish = make_publish(SingleDeviceSharding(learner.mesh.devices.flat[0]), model.dtype)
    self._step = setup.make_step(learner)

  def step(self) -> None:
    """Makes one train step and waits for it."""
    self._state, metrics = self._step(self._state, self._batch)
    jax.block_until_ready((self._state, metrics))

  def publish(self) -> None:
    """Copies the policy for a sampler on the first device and waits for the copy."""
    jax.block_until_ready(self._publish(self._state.policy.params))


def sharing_devices(rows: int) -> tuple[jax.Device, ...]:
  """Takes the largest number of local devices that share `rows` evenly."""
  local = placement.local_devices()
  return local[: max(count for count in range(1, len(local) + 1) if rows % count == 0)]


def full_batch(scale: Scale, vocab_size: int) -> TrajectoryBatch:
  """Makes a batch whose rows hold one trajectory each, a quarter of it prompt, sampled at uniform probabilities."""
  # A trajectory fills its row: a prompt, then sampled tokens to the end.
  rng = np.random.default_rng(0)
  shape = (scale.rows, scale.tokens)
  positions = np.broadcast_to(np.arange(scale.tokens, dtype=np.int32), shape)
  sampled = positions >= scale.tokens // 4

  # One reward per trajectory, 0 or 1, on its last token.
  rewards = np.zeros(shape, np.float32)
  rewards[:, -1] = rng.integers(0, 2, scale.rows)

  return TrajectoryBatch(
    token_ids=rng.integers(0, vocab_size, shape).astype(np.int32),
    segment_ids=np.ones(shape, np.int32),
    trajectory_ids=np.ones(shape, np.int32),
    positions=positions,
    action_mask=sampled,
    loss_mask=sampled,
    behavior_logprobs=np.where(sampled, -np.log(vocab_size), np.nan).astype(np.float32),
    policy_version=np.where(sampled, 0, -1).astype(np.int32),
    rewards=rewards,
    truncated=np.zeros(shape, np.bool_),
  )


def train_step(scale: Scale, peers: Peers | None = None) -> dict[str, Any]:
  """Measures one critic plus one policy update: tokens per second, share of the GEMM limit, cost of a publish.

  Once with the critic's attention frozen, the default of a run, and once with nothing frozen, as in the other
  frameworks. With `peers` google-tunix and PyTorch make their updates in turn with ours.
  """
  return {"dense": _train_step(scale, scale.dense, peers), "moe": _train_step(scale, scale.moe, peers)}


def _train_step(scale: Scale, config: ModelConfig, peers: Peers | None) -> dict[str, Any]:
  # Time the matrix product, both trainers, a publish and the peers in turn.
  gemm, gemm_flops = make_gemm(scale.gemm_size)
  trainers = {
    "attention_frozen": Trainer(scale, config, freeze=True),
    "nothing_frozen": Trainer(scale, config, freeze=False),
  }
  steps: dict[str, Callable[[], object]] = {key: trainer.step for key, trainer in trainers.items()}
  with ExitStack() as stack:
    task = training_task(scale, config)
    theirs = {
      name: stack.enter_context(peers.start(f"{name}_training", task)) for name in (TRAINING_PEERS if peers else ())
    }
    publish = trainers["attention_frozen"].publish
    seconds = interleave({"gemm": gemm, **steps, "publish": publish, **theirs}, scale.rounds)

  # Compare each trainer with the product, and with the other frameworks, round by round.
  tokens = scale.rows * scale.tokens
  result: dict[str, Any] = {}
  for key, trainer in trainers.items():
    result[key] = {
      "tokens_per_second": tokens / statistics.median(seconds[key]),
      "share_of_gemm": tokens * trainer.flops_per_token / gemm_flops * median_ratio(seconds["gemm"], seconds[key]),
    } | {f"over_{name}": median_ratio(seconds[name], seconds[key]) for name in theirs}

  if theirs:
    result["peers_tokens_per_second"] = {name: tokens / statistics.median(seconds[name]) for name in theirs}
  return result | {
    "publish_share_of_step": median_ratio(seconds["publish"], seconds["attention_frozen"]),
    "gemm_flops_per_second": gemm_flops / statistics.median(seconds["gemm"]),
  }


def experts(scale: Scale) -> dict[str, Any]:
  """Measures the cost of more experts at fixed active work, relative to the fewest, for one layer and a train step."""
  configs = {str(count): dataclasses.replace(scale.moe, num_experts=count) for count in scale.experts}
  layers = {count: _layer(scale, config) for count, config in configs.items()}
  steps = {count: Trainer(scale, config, freeze=True).step for count, config in configs.items()}
  return {
    "layer_forward_and_backward": _relative(interleave(layers, scale.rounds)),
    "train_step": _relative(interleave(steps, scale.rounds)),
  }


def _relative(seconds: dict[str, list[float]]) -> dict[str, float]:
  fewest = next(iter(seconds.values()))
  ratios = {f"{count}_experts": median_ratio(times, fewest) for count, times in seconds.items()}
  return ratios | {"highest_over_lowest": max(ratios.values()) / min(ratios.values())}


def _layer(scale: Scale, config: ModelConfig) -> Callable[[], object]:
  """Makes the forward and backward pass of one MoE layer on the tokens of a batch."""
  specs = {"moe": param_specs(config)["moe_layers"]["moe"]}
  params = jax.tree.map(lambda leaf: leaf[0], init_params(specs, jax.random.key(0))["moe"])
  x = jax.random.normal(jax.random.key(1), (scale.rows, scale.tokens, config.d_model), jnp.float32)

  def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean(moe_feed_forward(params, x, config, ONE_DEVICE)[0] * x, dtype=jnp.float32)

  gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
  return lambda: jax.block_until_ready(gradients(params, x))
