"""Floating-point operations that the mathematics needs: two per weight that a token meets in a matrix product.

Attention scores, norms, softmax, the optimiser and whatever is computed twice are left out, so a share of the
machine's limit is never flattered.
"""

from __future__ import annotations

import math

import jax

from sao_jax.config import ModelConfig
from sao_jax.models.moe import EXPERT_WEIGHTS
from sao_jax.models.transformer import param_specs
from sao_jax.models.value import value_param_specs
from sao_jax.parallel.params import Specs, path_name


def matmul_weights(specs: Specs, config: ModelConfig) -> dict[str, float]:
  """For every matrix the number of its weights that one token meets, by name; of the experts, the active ones.

  For untied models: the embedding is looked up, not multiplied.
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
  """FLOPs of one sampled token: a forward pass of the policy."""
  return 2.0 * sum(matmul_weights(param_specs(config), config).values())


def train_flops(config: ModelConfig, frozen_value_paths: frozenset[str] = frozenset()) -> float:
  """FLOPs per token of one policy and one critic update: forward, gradients of activations, gradients of weights.

  Frozen weights have no gradient, but the gradients of the activations still pass through them.
  """
  policy = matmul_weights(param_specs(config), config)
  critic = matmul_weights(value_param_specs(config), config)
  frozen = sum(count for name, count in critic.items() if name in frozen_value_paths)
  return 6.0 * (sum(policy.values()) + sum(critic.values())) - 2.0 * frozen
