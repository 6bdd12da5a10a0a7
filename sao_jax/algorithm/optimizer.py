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
  """Train step i = 0, 1, ... gets learning_rate * min(1, (i + 1) / warmup_steps): no step is wasted on 0.

  It depends on the optimiser's count and the config only, so a restored run follows its new config.
  """

  def schedule(count: jax.Array) -> jax.Array:
    step = count // updates_per_step + 1
    return config.learning_rate * jnp.minimum(step / max(config.warmup_steps, 1), 1.0)

  return schedule


def make_optimizer(config: OptimizerConfig, updates_per_step: int = 1) -> optax.GradientTransformation:
  """The optimiser of one network.

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
