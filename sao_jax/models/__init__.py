"""One transformer for policy and critic, in training and in sampling: attention, experts, router, heads, LoRA.

Parameters, token ids, positions and segments enter; hidden states leave, and from them token log-probabilities,
entropies and values, all in fp32. Parameters are declared once, as trees of `ParamSpec`.
"""

from __future__ import annotations

from sao_jax.models.critic import critic_params_from_policy, critic_specs, make_critic_apply
from sao_jax.models.lora import merge_lora
from sao_jax.models.policy import make_policy_apply
from sao_jax.models.transformer import param_specs, trunk

__all__ = [
  "critic_params_from_policy",
  "critic_specs",
  "make_critic_apply",
  "make_policy_apply",
  "merge_lora",
  "param_specs",
  "trunk",
]
