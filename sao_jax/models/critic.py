"""The critic: the policy's trunk with its own parameters and a zero-initialised scalar (or bin) head.

With "logprob_embed" among its parameters it reads, beside each sampled token, the log-probability that the sampler gave
to it. A token that should not stand where it does (a wrong digit, a wrong turn) is an unlikely one: the policy knows,
and a critic that reads tokens alone has to learn it anew from returns. The value of a state reads the log-probs of the
tokens before it only, so advantages stay unbiased. As in asymmetric critics (arXiv 1710.06542), it helps to evaluate
and is not needed to act.
"""

from __future__ import annotations

import functools
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

ADDED = ("value_head", "logprob_embed")  # the parameters that are no part of the trunk


def critic_specs(
  config: ModelConfig, num_outputs: int = 1, initializer: str = "zeros", *, reads_logprobs: bool = False
) -> Specs:
  """The policy's parameters without a language-model head, plus "value_head" [D, num_outputs].

  With `reads_logprobs` also "logprob_embed" [D]: the direction in which a log-prob moves the embedding of its token.
  Both start as "zeros", so that V = 0 and the trunk computes what the policy's does, or "normal": N(0,
  config.initializer_range).
  """
  specs = {name: spec for name, spec in param_specs(config).items() if name != "head"}
  spec = functools.partial(
    ParamSpec, initializer=initializer, dtype=config.param_dtype, stddev=config.initializer_range
  )
  specs["value_head"] = spec((config.d_model, num_outputs), (None, None))
  if reads_logprobs:
    specs["logprob_embed"] = spec((config.d_model,), (None,))
  return specs


def critic_params_from_policy(
  policy_params: Params,
  config: ModelConfig,
  num_outputs: int = 1,
  initializer: str = "zeros",
  key: Key[Array, ""] | None = None,
  *,
  reads_logprobs: bool = False,
) -> Params:
  """A critic that starts from a policy: a copy of its trunk and a new head, see `critic_specs`.

  The language-model head is never read, whatever its shape: a slice of it would be a value head that knows tokens.
  `key` is for a "normal" head.
  """
  trunk = {name: jax.tree.map(jnp.copy, policy_params[name]) for name in critic_specs(config) if name not in ADDED}
  return trunk | new_head(config, num_outputs, initializer, key, reads_logprobs=reads_logprobs)


def new_head(
  config: ModelConfig,
  num_outputs: int = 1,
  initializer: str = "zeros",
  key: Key[Array, ""] | None = None,
  *,
  reads_logprobs: bool = False,
) -> Params:
  """The initial parameters of a critic that are no part of the trunk; arguments as in `critic_params_from_policy`."""
  specs = critic_specs(config, num_outputs, initializer, reads_logprobs=reads_logprobs)
  added = {name: specs[name] for name in ADDED if name in specs}
  return init_params(added, jax.random.key(0) if key is None else key)


def make_critic_apply(
  config: ModelConfig, *, layout: Layout = ONE_DEVICE
) -> Callable[[Params, TrajectoryBatch], jax.Array]:
  """Returns `critic_apply(params, batch) -> outputs [B, T, num_outputs]`, fp32 and state-aligned.

  Entry t is the output after reading the tokens up to and including t: the value of the state before token t + 1.
  Parameters with "logprob_embed" read `batch.behavior_logprobs` of the sampled tokens, too; one that is not finite
  makes outputs NaN, and so no update. Tokens that a segment repeats from an earlier one were not sampled there.
  """

  def critic_apply(params: Params, batch: TrajectoryBatch) -> jax.Array:
    added = None
    if "logprob_embed" in params:
      logprobs = jnp.where(batch.action_mask, batch.behavior_logprobs, 0.0)
      added = logprobs[..., None] * params["logprob_embed"].astype(jnp.float32)
    hidden, _ = packed_trunk(params, config, batch, layout, added=added)  # the policy's experts are not the critic's
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
