"""The critic: the policy's trunk with its own parameters and a zero-initialised scalar (or bin) head."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from sao_jax.config import ModelConfig
from sao_jax.models.attention import attention_kind
from sao_jax.models.linear import linear
from sao_jax.models.policy import packed_trunk
from sao_jax.models.transformer import fixed_paths, param_specs
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.params import Params, ParamSpec, Specs, init_params, path_names
from sao_jax.types import TrajectoryBatch


def critic_specs(config: ModelConfig, num_outputs: int = 1, initializer: str = "zeros") -> Specs:
  """The policy's parameters without a language-model head, plus "value_head" [D, num_outputs].

  The head starts as "zeros", so that V = 0, or "normal": N(0, config.initializer_range).
  """
  specs = {name: spec for name, spec in param_specs(config).items() if name != "head"}
  shape = (config.d_model, num_outputs)
  head = ParamSpec(shape, (None, None), initializer, config.param_dtype, stddev=config.initializer_range)
  return specs | {"value_head": head}


def critic_params_from_policy(
  policy_params: Params,
  config: ModelConfig,
  num_outputs: int = 1,
  initializer: str = "zeros",
  key: Key[Array, ""] | None = None,
) -> Params:
  """A critic that starts from a policy: a copy of its trunk and a new head, see `critic_specs`.

  The language-model head is never read, whatever its shape: a slice of it would be a value head that knows tokens.
  `key` is for a "normal" head.
  """
  specs = critic_specs(config, num_outputs, initializer)
  trunk = {name: jax.tree.map(jnp.copy, policy_params[name]) for name in specs if name != "value_head"}
  head = init_params({"value_head": specs["value_head"]}, jax.random.key(0) if key is None else key)
  return trunk | head


def make_critic_apply(
  config: ModelConfig, *, layout: Layout = ONE_DEVICE
) -> Callable[[Params, TrajectoryBatch], jax.Array]:
  """Returns `critic_apply(params, batch) -> outputs [B, T, num_outputs]`, fp32 and state-aligned.

  Entry t is the output after reading the tokens up to and including t: the value of the state before token t + 1.
  """

  def critic_apply(params: Params, batch: TrajectoryBatch) -> jax.Array:
    hidden, _ = packed_trunk(params, config, batch, layout)  # the policy's experts are not the critic's
    return linear(hidden, params["value_head"], layout, dtype=jnp.float32)

  return critic_apply


def frozen_critic_paths(
  config: ModelConfig, *, attention: bool = True, router: bool = False, embeddings: bool = False
) -> frozenset[str]:
  """The leaves of the critic that stay fixed during RL, by full name; nothing is matched by pattern.

  Attention means all parameters of the attention modules, their q/k norms and biases included, but not the norms before
  them. The indexers of sparse attention and the correction biases of routers, which have no gradient, are always in it.

  Raises:
    ValueError: the model declares a parameter of attention that its kind does not list (`AttentionKind.names`).
  """
  declared = set(path_names(critic_specs(config)))
  names = attention_kind(config).names
  listed = {f"{layers}/attention/{name}" for layers in ("dense_layers", "moe_layers") for name in names}
  unlisted = {name for name in declared if "/attention/" in name} - listed
  if unlisted:
    raise ValueError(f"no list says whether these parameters of attention can be frozen: {sorted(unlisted)}")
  paths = set(fixed_paths(config))
  if attention:
    paths |= listed
  if router:
    paths.add("moe_layers/moe/router")
  if embeddings:
    paths.add("embed")
  return frozenset(paths & declared)
