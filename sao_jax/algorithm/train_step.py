"""One SAO train step: K critic updates, values, advantages, one policy update (arXiv 2607.07508)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from sao_jax.algorithm.advantage import masked_whiten
from sao_jax.algorithm.critic_update import CriticFit, ValueApply, critic_metrics, fit_critic, read_values
from sao_jax.algorithm.diagnostics import lag_metrics, token_lags
from sao_jax.algorithm.frozen import trainable_leaves
from sao_jax.algorithm.policy_update import PolicyApply, fit_policy, policy_metrics
from sao_jax.algorithm.reductions import masked_mean_and_std
from sao_jax.algorithm.targets import batch_metrics, critic_advantages, trained_tokens
from sao_jax.config import AlgorithmConfig
from sao_jax.types import NetworkState, PyTree, TrainState, TrajectoryBatch

Metrics = dict[str, Array]
# (policy parameters, load of every expert [L, E]) -> policy parameters
BalanceRouters = Callable[[PyTree, Float[Array, "L E"]], PyTree]
TrainStep = Callable[[TrainState, TrajectoryBatch], tuple[TrainState, Metrics]]


def init_train_state(
  policy_params: PyTree,
  value_params: PyTree,
  policy_optimizer: optax.GradientTransformation,
  value_optimizer: optax.GradientTransformation,
  frozen_value_paths: frozenset[str] = frozenset(),
  frozen_policy_paths: frozenset[str] = frozenset(),
) -> TrainState:
  """The state at version 0. Optimisers see the trainable leaves only, as flat dicts by name."""

  def network(params: PyTree, optimizer: optax.GradientTransformation, frozen: frozenset[str]) -> NetworkState:
    return NetworkState(params, optimizer.init(trainable_leaves(params, frozen)), jnp.zeros((), jnp.int32))

  return TrainState(
    policy=network(policy_params, policy_optimizer, frozen_policy_paths),
    critic=network(value_params, value_optimizer, frozen_value_paths),
    policy_version=jnp.zeros((), jnp.int32),
  )


def make_train_step(
  config: AlgorithmConfig,
  policy_apply: PolicyApply,
  value_apply: ValueApply,
  policy_optimizer: optax.GradientTransformation,
  value_optimizer: optax.GradientTransformation,
  *,
  frozen_value_paths: frozenset[str] = frozenset(),
  frozen_policy_paths: frozenset[str] = frozenset(),
  update_policy: bool = True,
  balance_routers: BalanceRouters | None = None,
  max_lag: int = 8,
  state_shardings: TrainState | None = None,
) -> TrainStep:
  """Returns the jitted `train_step(state, batch) -> (state, metrics)`; the state is donated.

  Args:
    config: static.
    policy_apply: `(params, batch) -> PolicyOutputs`, token-aligned, fp32.
    value_apply: `(params, batch) -> outputs [B, T, O]`, state-aligned, fp32; O as the value head of `config` says.
    policy_optimizer: of the policy.
    value_optimizer: of the critic.
    frozen_value_paths: names of the critic's leaves that stay fixed, see `frozen`.
    frozen_policy_paths: and of the policy's.
    update_policy: False makes critic-only steps (value pretraining, critic warm-up): the policy is neither run nor
      changed, and `policy_version` stays.
    balance_routers: changes the policy's parameters after its update, by the load of the experts in this batch; None:
      nothing does. Needs `RouterStatistics`. It does not run when the update was skipped.
    max_lag: last bin of the metrics by lag.
    state_shardings: shardings of the state, kept by the step; metrics then come back replicated. None: one device, or
      whatever the compiler chooses.

  The metrics have the same keys and shapes in every mode and for every batch; all are fp32 and reduced over the global
  batch. NaN means undefined: nothing to average over, or a figure of the policy in a critic-only step.
  """

  def policy_part(
    policy: NetworkState,
    critic: NetworkState,
    fit: CriticFit,
    batch: TrajectoryBatch,
    mask: Bool[Array, "B T"],
    lags: Int[Array, "B T"],
  ) -> tuple[NetworkState, Metrics]:
    if config.advantage_values == "pre":
      values = fit.values_before
    else:
      values = read_values(config, value_apply, critic.params, batch)
    advantages = critic_advantages(config, batch, values)
    mean, std = masked_mean_and_std(advantages, mask)
    if config.whiten_advantages:
      advantages = masked_whiten(advantages, mask)
    policy, policy_fit = fit_policy(
      config, policy_apply, policy_optimizer, frozen_policy_paths, policy, batch, mask, advantages
    )
    if balance_routers is not None:
      balanced = balance_routers(policy.params, jnp.sum(policy_fit.outputs.router.load, axis=0))
      keep = lambda new, old: jnp.where(policy_fit.update.applied, new, old)
      policy = policy.replace(params=jax.tree.map(keep, balanced, policy.params))
    metrics = policy_metrics(config, policy_fit, batch, mask, lags, max_lag)
    return policy, metrics | {"advantage_mean": mean, "advantage_std": std}

  def train_step(state: TrainState, batch: TrajectoryBatch) -> tuple[TrainState, Metrics]:
    mask = trained_tokens(batch, config.truncation)
    critic, fit = fit_critic(config, value_apply, value_optimizer, frozen_value_paths, state.critic, batch, mask)
    lags = token_lags(state.policy_version, batch.policy_version, mask)
    metrics = (
      batch_metrics(batch, mask) | critic_metrics(config, fit, batch, mask) | lag_metrics(lags, mask, max_lag=max_lag)
    )
    if update_policy:
      policy, of_policy = policy_part(state.policy, critic, fit, batch, mask, lags)
      version = state.policy_version + 1
    else:
      _, shapes = jax.eval_shape(policy_part, state.policy, critic, fit, batch, mask, lags)
      of_policy = {name: jnp.full(x.shape, jnp.nan, x.dtype) for name, x in shapes.items()}
      of_policy["policy_updates_skipped"] = jnp.zeros((), jnp.float32)
      policy, version = state.policy, state.policy_version
    return TrainState(policy, critic, version), metrics | of_policy

  if state_shardings is None:
    return jax.jit(train_step, donate_argnums=0)
  mesh = jax.tree.leaves(state_shardings)[0].mesh
  replicated = NamedSharding(mesh, PartitionSpec())
  return jax.jit(train_step, donate_argnums=0, out_shardings=(state_shardings, replicated))
