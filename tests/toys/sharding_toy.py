"""A packed batch, and a loss over all outputs of a network with its gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.models.critic import make_critic_apply
from sao_jax.models.policy import make_policy_apply
from sao_jax.parallel.layout import Layout
from sao_jax.types import TrajectoryBatch


def make_batch():
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 12, (8, 12)).astype(np.int32)
  lengths = rng.integers(2, 5, (8, 3)) * (rng.random((8, 3)) > 0.2)
  segments, positions = np.zeros_like(ids), np.zeros_like(ids)
  for row in range(8):
    start = 0
    for number, length in enumerate(lengths[row]):
      segments[row, start : start + length] = number + 1
      positions[row, start : start + length] = np.arange(length)
      start += length
  numbers, flags = np.zeros(ids.shape, np.float32), np.zeros(ids.shape, bool)
  return TrajectoryBatch(ids, segments, segments, positions, flags, flags, numbers, np.zeros_like(ids), numbers, flags)


def loss_and_gradients(network, config, mesh):
  """Jitted; a sum over every output with weights that differ by token, so that nothing can cancel."""
  if network == "policy":
    policy_apply = make_policy_apply(config, layout=Layout(mesh), chunk=16)

    def apply(params, batch):
      outputs = policy_apply(params, batch)
      return outputs.logprobs + outputs.entropy

  else:
    critic_apply = make_critic_apply(config, layout=Layout(mesh))
    apply = lambda params, batch: critic_apply(params, batch)[..., 0]

  @jax.jit
  def run(params, batch):
    def loss(params):
      outputs = apply(params, batch)
      weights = jnp.cos(jnp.arange(outputs.size, dtype=jnp.float32)).reshape(outputs.shape)
      return jnp.sum(outputs * weights), outputs

    return jax.value_and_grad(loss, has_aux=True)(params)

  return run
