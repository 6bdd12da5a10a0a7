"""AdamW with global-norm clipping and linear warm-up to a constant learning rate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from sao_jax.config import OptimizerConfig
from sao_jax.types import PyTree


def decays(params: PyTree) -> PyTree:
  """True on the leaves with weight decay: all but norm scales and biases, told by the last part of their names.

  By name and not by rank: the norms of scanned layers are stacked [L, D].
  """

  def leaf_decays(path: tuple, _: PyTree) -> bool:
    return not jax.tree_util.keystr(path, simple=True, separator="/").endswith(("norm", "bias"))

  return jax.tree_util.tree_map_with_path(leaf_decays, params)


def learning_rate_schedule(config: OptimizerConfig, updates_per_step: int = 1) -> optax.Schedule:
  """Learning rate of train step i = 0, 1, ...: learning_rate * min(1, (i + 1) / warmup_steps), never wasted on 0.

  It depends on the optimiser's count and the config only, so a restored run follows its new config.

  >>> schedule = learning_rate_schedule(OptimizerConfig(learning_rate=0.1, warmup_steps=4))
  >>> [round(float(schedule(count)), 4) for count in range(6)]
  [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]
  """

  def schedule(count: jax.Array) -> jax.Array:
    step = count // updates_per_step + 1
    return config.learning_rate * jnp.minimum(step / max(config.warmup_steps, 1), 1.0)

  return schedule


def make_optimizer(config: OptimizerConfig, updates_per_step: int = 1) -> optax.GradientTransformation:
  """Makes the optimiser of one network.

  Args:
    config: learning rate, moments, weight decay, clip (0: no clipping), warm-up.
    updates_per_step: updates that this optimiser makes per train step (K for the critic), so that `warmup_steps` counts
      train steps for both networks.
  """
  adamw = optax.adamw(
    learning_rate_schedule(config, updates_per_step),
    b1=config.b1,
    b2=config.b2,
    eps=config.eps,
    weight_decay=config.weight_decay,
    mask=decays,
  )
  return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm > 0.0 else adamw
