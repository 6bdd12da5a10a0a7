"""The value network: the policy's trunk with its own parameters and a zero-initialised scalar (or bin) head."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sao_jax.config import ModelConfig
from sao_jax.models.linear import linear
from sao_jax.models.policy import packed_trunk
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import Params, ParamSpec, Specs
from sao_jax.parallel.rules import DEFAULT_RULES, AxisRules
from sao_jax.types import TrajectoryBatch


def value_param_specs(config: ModelConfig, num_outputs: int = 1) -> Specs:
  """The policy's parameters without a language-model head, plus "value_head" [D, num_outputs] of zeros: V = 0."""
  specs = {name: spec for name, spec in param_specs(config).items() if name != "head"}
  head = ParamSpec((config.d_model, num_outputs), (None, None), "zeros", config.param_dtype)
  return specs | {"value_head": head}


def value_params_from_policy(policy_params: Params, config: ModelConfig, num_outputs: int = 1) -> Params:
  """A value network that starts from a policy: a copy of its trunk and a zero head.

  The language-model head is never read, whatever its shape: a slice of it would be a value head that knows tokens.
  """
  specs = value_param_specs(config, num_outputs)
  trunk = {name: jax.tree.map(jnp.copy, policy_params[name]) for name in specs if name != "value_head"}
  return trunk | {"value_head": jnp.zeros(specs["value_head"].shape, specs["value_head"].dtype)}


def make_value_apply(
  config: ModelConfig, *, mesh: Mesh | None = None, rules: AxisRules = DEFAULT_RULES
) -> Callable[[Params, TrajectoryBatch], jax.Array]:
  """Returns `value_apply(params, batch) -> outputs [B, T, num_outputs]`, fp32 and state-aligned.

  Entry t is the output after reading the tokens up to and including t: the value of the state before token t + 1.
  """

  def value_apply(params: Params, batch: TrajectoryBatch) -> jax.Array:
    hidden = packed_trunk(params, config, batch, mesh, rules)
    return linear(hidden, params["value_head"], dtype=jnp.float32)

  return value_apply


def frozen_value_paths(
  config: ModelConfig, *, attention: bool = True, router: bool = False, embeddings: bool = False
) -> frozenset[str]:
  """The leaves of the value network that stay fixed during RL, by full name; nothing is matched by pattern.

  Attention means all parameters of the attention modules, their q/k norms included, but not the norms before them.
  """
  layers = []
  if not config.num_experts or config.num_dense_layers:
    layers.append("dense_layers")
  if config.num_experts and config.num_dense_layers < config.num_layers:
    layers.append("moe_layers")
  names = ("q", "k", "v", "o") + (("q_norm", "k_norm") if config.qk_norm else ())
  paths = [f"{layer}/attention/{name}" for layer in layers for name in names] if attention else []
  if router and "moe_layers" in layers:
    paths.append("moe_layers/moe/router")
  if embeddings:
    paths.append("embed")
  return frozenset(paths)
