"""LoRA's factors at the start of a phase: fresh ones where a checkpoint has none, a check of their scale otherwise."""

from __future__ import annotations

import jax
import numpy as np

from sao_jax.config import LoRAConfig
from sao_jax.errors import ConfigError
from sao_jax.learner.setup import Learner, init_sharded
from sao_jax.models.critic import critic_params_from_policy
from sao_jax.models.critic_lora import critic_lora_params
from sao_jax.models.lora import lora_scale, merge_lora
from sao_jax.types import PyTree


def add_fresh_lora(learner: Learner, params: PyTree, seed: int) -> PyTree:
  """Adds LoRA's initial factors to policy parameters without any, if the learner trains them."""
  if "lora" in params or "lora" not in learner.policy.specs:
    return params
  return params | init_sharded({"lora": learner.policy.specs["lora"]}, learner.layout, seed)


def fresh_critic(learner: Learner, policy_params: PyTree, seed: int) -> PyTree:
  """Makes the critic that starts as the policy is, with a new head: a copy of it, or factors where those train."""
  config, specs = learner.config, learner.critic.specs
  head = {
    "num_outputs": specs["value_head"].shape[-1],
    "initializer": config.algorithm.value_head_initializer,
    "key": jax.random.key(seed),
    "reads_logprobs": config.algorithm.critic_reads_logprobs,
  }
  if "lora" not in specs:
    return critic_params_from_policy(merge_lora(policy_params, keep_dtype=True), config.model, **head)
  factors = init_sharded({"lora": specs["lora"]}, learner.layout, seed)["lora"]
  return critic_lora_params(policy_params, factors, config.model, shares_base=config.shares_base, **head)


def check_lora_scale(section: str, lora: LoRAConfig, params: PyTree) -> None:
  """Refuses parameters whose factors were trained with another scale than the configuration has.

  Args:
    section: "model.lora" or "critic.lora".
    lora: that section.
    params: of the policy or of the critic; abstract ones pass.

  Raises:
    ConfigError: naming the alpha that they belong to.
  """
  scale = params["lora"]["scale"] if "lora" in params else None
  if scale is None or isinstance(scale, jax.ShapeDtypeStruct):
    return
  if float(scale) != np.float32(lora_scale(lora)):
    alpha = float(scale) * lora.rank
    raise ConfigError(
      f"{section}.alpha",
      f"{lora.alpha} was set, the factors in the checkpoint belong to {alpha:g}.",
      f"Set {section}.alpha={alpha:g}.",
    )
