"""The critic: how many updates it gets for each of the policy, and what of it trains."""

from __future__ import annotations

from configs.studies.shared import CONFIG, FIELDS, method
from sao_jax.study import Study


def get_study() -> Study:
  """SAO makes two updates and leaves attention as it is."""
  return Study(
    name="critic",
    question="Do more critic updates explain more of the returns, and does frozen attention keep gradients smooth?",
    config=CONFIG,
    variants={name: method(name) for name in ("sao", "sao_k1", "sao_k4", "sao_full_critic", "sao_dis_only")},
    fields=FIELDS,
    pictures=("explained_variance", "critic_grad_norm", "reward_mean"),
    measures=(
      *("explained_variance:median", "explained_variance:change", "heldout_success", "reward_mean:mean"),
      *("critic_grad_norm:mean", "critic_grad_norm:max", "critic_grad_norm:spikes"),
    ),
  )
