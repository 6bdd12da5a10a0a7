"""SAO on one page: K critic steps, values, advantages, one DIS step (arXiv 2607.07508, eq. 1-5).

`make_train_step` is the whole method from top to bottom. Each line of it is one function of this room:

    tokens       which tokens count, and what runs along a trajectory
    pieces       the same for a trajectory in several rows
    td_steps     what GAE steps from and to           (tokens; or turns)
    advantage    λ-returns G, advantages A            (another estimator: a function in `ADVANTAGES`)
    value_loss   (V - G)²                             (another head: a `ValueHead`)
    policy_loss  - sg[f(ρ) A] log π                   (DIS; another f: a function in `POLICY_LOSSES`)
    network      one guarded gradient step, micro-batches, frozen leaves
    diagnostics  what is reported
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from sao_jax.algorithm import diagnostics
from sao_jax.algorithm.advantage import sao_advantages, value_targets, value_targets_need_values, whiten_advantages
from sao_jax.algorithm.baselines import running_mean_advantages
from sao_jax.algorithm.grpo import dr_grpo_advantages, grpo_advantages
from sao_jax.algorithm.loss_reduction import loss_scales
from sao_jax.algorithm.loss_variants import mean_log_ratios, of_trajectories, policy_token_losses
from sao_jax.algorithm.network import Network, Update, gradient_step, map_micro_batches
from sao_jax.algorithm.policy_loss import log_ratios
from sao_jax.algorithm.reductions import masked_count, masked_sum
from sao_jax.algorithm.td_steps import valued_tokens
from sao_jax.algorithm.tokens import sampled_tokens, token_values, trained_tokens
from sao_jax.algorithm.value_loss import make_value_head
from sao_jax.config import AlgorithmConfig
from sao_jax.errors import ConfigError
from sao_jax.types import NetworkState, PolicyOutputs, PyTree, TrainState, TrajectoryBatch

Metrics = dict[str, Array]
TrainStep = Callable[[TrainState, TrajectoryBatch], tuple[TrainState, Metrics]]


# (config, batch, state_values) -> advantages [B, T] of all sampled tokens, 0 elsewhere, before any whitening.
# `state_values` [B, T] are V of the state *after* each token, and `tokens.token_values` turns them to those before it;
# they are None without a critic. A batch's rewards stand on the last sampled tokens of turns.
Estimator = Callable[[AlgorithmConfig, TrajectoryBatch, Float[Array, "B T"] | None], Float[Array, "B T"]]

# `algorithm.advantage` names one of these; config.py says which of them need a critic or groups.
ADVANTAGES: dict[str, Estimator] = {
  "sao": sao_advantages,
  "grpo": grpo_advantages,
  "dr_grpo": dr_grpo_advantages,
  "running_mean": running_mean_advantages,
}


def init_train_state(
  policy: Network, critic: Network | None, policy_params: PyTree, critic_params: PyTree | None
) -> TrainState:
  """The state at version 0, with fresh optimisers. Without a critic, `critic` and its parameters are None."""
  return TrainState(
    policy=policy.start(policy_params),
    critic=None if critic is None else critic.start(critic_params),
    policy_version=jnp.zeros((), jnp.int32),
  )


def make_train_step(
  config: AlgorithmConfig,
  policy: Network,
  critic: Network | None,
  *,
  update_policy: bool = True,
  max_lag: int = -1,
  state_shardings: TrainState | None = None,
) -> TrainStep:
  """Returns the jitted `train_step(state, batch) -> (state, metrics)`; the state is donated.

  Args:
    config: static, as `configuration.validate` lets it pass; `algorithm.advantage` chooses the estimator.
    policy: its `apply` returns `PolicyOutputs`.
    critic: its `apply` returns as many outputs per token as the value head of `config` has; None for an estimator
      without one.
    update_policy: False makes critic-only steps (value pretraining, critic warm-up): the policy is not changed, and
      `policy_version` stays. It is run only to score demonstrations for a critic that reads log-probs.
    max_lag: tokens of a greater lag are counted as an overflow; a negative one is no bound.
    state_shardings: shardings of the state, kept by the step; metrics then come back replicated. None: one device, or
      whatever the compiler chooses.

  The metrics have the same keys and shapes in every mode and for every batch; all are fp32 and reduced over the global
  batch. NaN means undefined: nothing to average over, or a figure of the policy in a critic-only step.
  """
  if (critic is not None) != config.needs_critic or not (critic or update_policy):
    raise ConfigError(
      "algorithm.advantage",
      f"{config.advantage!r} with critic={critic and 'a network'} and update_policy={update_policy}.",
      "Pass a critic exactly where `config.needs_critic`; without one every step updates the policy.",
    )
  estimate = ADVANTAGES[config.advantage]

  def train_step(state: TrainState, batch: TrajectoryBatch) -> tuple[TrainState, Metrics]:
    # Advantages run over the sampled tokens; both losses sum over the trained ones, and divide once by their number N.
    sampled, trained = sampled_tokens(batch), trained_tokens(batch, config.truncation)
    lags = diagnostics.token_lags(state.policy_version, batch.policy_version, trained)
    metrics = diagnostics.batch_metrics(batch, sampled, trained)
    metrics |= diagnostics.lag_metrics(lags, trained, max_lag=max_lag)

    # Critic: K steps on (1/N) Σ (V - G)², attention frozen; G = R for γ = λ_critic = 1 and a terminal reward.
    critic_state, fit, value_network = state.critic, None, None
    if critic is not None:
      read, value_network = batch, critic.beside(state.policy.params)
      if config.critic_reads_logprobs and not update_policy:
        read = _scored(config, policy, state.policy.params, batch)
      valued = valued_tokens(config, batch, trained)
      critic_state, fit = _critic_steps(config, value_network, state.critic, read, valued)
      values_before = token_values(fit.values_before, batch)
      metrics |= diagnostics.critic_metrics(config, fit.updates, values_before, fit.targets, valued)

    # A function, since a critic-only step wants no more than the shapes of what it reports.
    def policy_half(policy_state: NetworkState) -> tuple[NetworkState, Metrics]:
      # Values: V after those steps, or before them.
      values = None if fit is None else fit.values_before
      if critic is not None and config.advantage_values == "post":
        values = _read_values(config, value_network, critic_state.params, batch)

      # Advantages, for sao: A_k = δ_k + γλ A_{k+1} from each sampled token to the next sampled one, λ = 1 - 1/(α n).
      with jax.named_scope("advantages"):
        advantages = estimate(config, batch, values)
        weights = whiten_advantages(advantages, batch, trained) if config.whitens() else advantages

      # Policy: one step on -(1/N) Σ sg[f(ρ) A] log π; ρ = exp(log π - μ), f(ρ) = ρ in (1 - ε_l, 1 + ε_h), else 0.
      # None where the critic's own updates were not finite: the advantages of such a critic mean nothing.
      trusted = jnp.all(fit.updates.applied) if fit is not None else jnp.ones((), jnp.bool_)
      policy_state, update, outputs = _policy_step(config, policy, policy_state, batch, trained, weights, trusted)
      of_policy = diagnostics.policy_metrics(config, update, outputs, batch, trained, advantages, weights, lags)
      return policy_state, of_policy

    if update_policy:
      policy_state, of_policy = policy_half(state.policy)
      return TrainState(policy_state, critic_state, state.policy_version + 1), metrics | of_policy

    # A critic-only step reports the same figures of the policy, all of them undefined, and does not run it.
    _, shapes = jax.eval_shape(policy_half, state.policy)
    of_policy = {name: jnp.full(x.shape, jnp.nan, x.dtype) for name, x in shapes.items()}
    of_policy["policy_updates_skipped"] = jnp.zeros((), jnp.float32)
    return TrainState(state.policy, critic_state, state.policy_version), metrics | of_policy

  if state_shardings is None:
    return jax.jit(train_step, donate_argnums=0)
  mesh = jax.tree.leaves(state_shardings)[0].mesh
  replicated = NamedSharding(mesh, PartitionSpec())
  return jax.jit(train_step, donate_argnums=0, out_shardings=(state_shardings, replicated))


@jax.named_scope("score_demonstrations")
def _scored(config: AlgorithmConfig, policy: Network, params: PyTree, batch: TrajectoryBatch) -> TrajectoryBatch:
  """The batch with the policy's log-probs on demonstrated tokens: nobody sampled them, so they came without (NaN).

  A batch of rollouts alone does not run the policy.
  """
  missing = batch.action_mask & jnp.isnan(batch.behavior_logprobs)

  def score() -> Float[Array, "B T"]:
    logprobs = map_micro_batches(lambda rows: policy.apply(params, rows).logprobs, batch, config.micro_batches)
    return jnp.where(missing, logprobs, batch.behavior_logprobs)

  return batch.replace(behavior_logprobs=jax.lax.cond(jnp.any(missing), score, lambda: batch.behavior_logprobs))


@jax.named_scope("values")
def _read_values(
  config: AlgorithmConfig, critic: Network, params: PyTree, batch: TrajectoryBatch
) -> Float[Array, "B T"]:
  """V of the state after each token (state-aligned), without gradients."""
  head = make_value_head(config)
  return map_micro_batches(lambda rows: head.values(critic.apply(params, rows)), batch, config.micro_batches)


class _CriticFit(NamedTuple):
  """Values, targets and updates of the K critic steps.

  Attributes:
    values_before: V of the state after each token [B, T], read before the first update.
    targets: value targets [B, T], the same for all updates.
    updates: the K updates, stacked.
  """

  values_before: Float[Array, "B T"]
  targets: Float[Array, "B T"]
  updates: Update


@jax.named_scope("critic")
def _critic_steps(
  config: AlgorithmConfig, critic: Network, state: NetworkState, batch: TrajectoryBatch, trained: Bool[Array, "B T"]
) -> tuple[NetworkState, _CriticFit]:
  """K = `config.value_updates` gradient steps on the batch.

  The values before the updates come out of the first step's own forward pass, unless something must know them earlier.
  """
  head, num_trained = make_value_head(config), masked_count(trained)

  # Targets, the same for all updates; λ_critic-returns are built from the values before them.
  values = None
  if value_targets_need_values(config) or config.value_clip > 0.0:
    values = _read_values(config, critic, state.params, batch)
  targets = value_targets(config, batch, values)
  old_values = None if values is None else token_values(values, batch)

  # (1/N) Σ (V - G)² over a part of the rows; the parts of all micro-batches add up to the loss.
  def loss_fn(params: PyTree, inputs: PyTree) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
    rows, mask, targets, old_values = inputs
    outputs = critic.apply(params, rows)
    losses = head.losses(token_values(outputs, rows), targets, mask, old_values)
    return masked_sum(losses, mask) / jnp.maximum(num_trained, 1.0), head.values(outputs)

  def step(state: NetworkState, _: None) -> tuple[NetworkState, tuple[Update, Float[Array, "B T"]]]:
    state, update, values = gradient_step(
      critic,
      state,
      loss_fn,
      (batch, trained, targets, old_values),
      micro_batches=config.micro_batches,
      allowed=lambda values: num_trained > 0.0,
    )
    return state, (update, values)

  state, (updates, all_values) = jax.lax.scan(step, state, None, length=config.value_updates)
  return state, _CriticFit(all_values[0], targets, updates)


@jax.named_scope("policy")
def _policy_step(
  config: AlgorithmConfig,
  policy: Network,
  state: NetworkState,
  batch: TrajectoryBatch,
  trained: Bool[Array, "B T"],
  advantages: Float[Array, "B T"],
  trusted: Bool[Array, ""],
) -> tuple[NetworkState, Update, PolicyOutputs]:
  """One gradient step. It is skipped unless the critic is `trusted`, and every advantage and log-ratio finite."""
  num_trained = masked_count(trained)
  scales, denominator = loss_scales(config, batch, trained)
  trajectory_log_ratio = _trajectory_log_ratio(config, policy, state.params, batch, trained)

  # -(1/N) Σ sg[f(ρ) A] log π over a part of the rows; the parts of all micro-batches add up to the loss.
  def loss_fn(params: PyTree, inputs: PyTree) -> tuple[Float[Array, ""], PolicyOutputs]:
    rows, mask, advantages, scales, log_ratio = inputs
    outputs = policy.apply(params, rows)
    losses = policy_token_losses(config, outputs.logprobs, rows.behavior_logprobs, advantages, mask, log_ratio)
    return masked_sum(scales * losses, mask) / jnp.maximum(denominator, 1.0), outputs

  # The loss of a broken ratio is 0, and would pass for a good one; so is a rejected token's with a broken advantage.
  def allowed(outputs: PolicyOutputs) -> Bool[Array, ""]:
    ratios = log_ratios(outputs.logprobs, batch.behavior_logprobs, trained)
    usable = jnp.isfinite(ratios) & jnp.isfinite(jnp.where(trained, advantages, 0.0))
    return (num_trained > 0.0) & trusted & jnp.all(usable)

  return gradient_step(
    policy,
    state,
    loss_fn,
    (batch, trained, jax.lax.stop_gradient(advantages), scales, trajectory_log_ratio),
    micro_batches=config.micro_batches,
    allowed=allowed,
  )


def _trajectory_log_ratio(
  config: AlgorithmConfig, policy: Network, params: PyTree, batch: TrajectoryBatch, trained: Bool[Array, "B T"]
) -> Float[Array, "B T"] | None:
  """The mean log-ratio of each token's trajectory, by a forward pass of its own, where the loss wants it."""
  if not of_trajectories(config):
    return None
  logprobs = map_micro_batches(lambda rows: policy.apply(params, rows).logprobs, batch, config.micro_batches)
  return mean_log_ratios(logprobs, batch, trained)
