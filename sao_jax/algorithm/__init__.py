"""The mathematics of SAO (arXiv 2607.07508): advantages, losses, diagnostics and the train step that joins them.

A train state and a packed batch [B, T] enter, with the two networks as plain functions; the next state and a dict of
metrics leave. The room knows no model, no mesh and no sampler. Begin with `train_step`.
"""

from __future__ import annotations

from sao_jax.algorithm.advantage import skip_observation_gae
from sao_jax.algorithm.network import Network
from sao_jax.algorithm.optimizer import make_optimizer
from sao_jax.algorithm.policy_loss import dis_policy_loss
from sao_jax.algorithm.train_step import ADVANTAGES, init_train_state, make_train_step

__all__ = [
  "ADVANTAGES",
  "Network",
  "dis_policy_loss",
  "init_train_state",
  "make_optimizer",
  "make_train_step",
  "skip_observation_gae",
]
