"""Methods by name: the fields that make a run's method SAO, one of its ablations, or what it is compared with.

All of them are the one train step with another advantage, loss or critic (`sao_jax/algorithm/README.md`); nothing else
of a run changes, but for groups where a method needs them. Learning rates are not part of a method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sao_jax.configuration import config_tree
from sao_jax.errors import ConfigError

Fields = Mapping[str, Any]

_NO_CRITIC: Fields = {"algorithm.critic_warmup_steps": 0}
_GROUPS: Fields = _NO_CRITIC | {"algorithm.advantage": "grpo", "rollout.group_size": 8}
_CLIP_HIGHER: Fields = {"algorithm.policy_loss": "ppo", "algorithm.epsilon_low": 0.2, "algorithm.epsilon_high": 0.28}
_SEQUENCES: Fields = {"algorithm.policy_loss_reduction": "sequence_mean"}
_GRPO: Fields = _GROUPS | _CLIP_HIGHER | _SEQUENCES
_PLAIN_CRITIC: Fields = {"algorithm.value_updates": 1, "algorithm.freeze_attention": False}
_RUNNING_MEAN: Fields = _NO_CRITIC | {"algorithm.advantage": "running_mean"}

METHODS: dict[str, Fields] = {
  "sao": {},
  "sao_dis_only": _PLAIN_CRITIC,
  "sao_k1": {"algorithm.value_updates": 1},
  "sao_k4": {"algorithm.value_updates": 4},
  "sao_full_critic": {"algorithm.freeze_attention": False},
  "sao_values_before": {"algorithm.advantage_values": "pre"},
  "sao_whitened": {"algorithm.whiten_advantages": True},
  "sao_raw": {"algorithm.whiten_advantages": False},
  "sao_step_average": {"algorithm.gae": "step_average"},
  "sao_step_last": {"algorithm.gae": "step_last"},
  "sao_through_observations": {"algorithm.gae": "through_observations"},
  "sao_segments": {"algorithm.gae": "segments"},
  "sao_response_lambda": {"algorithm.lambda_length": "response"},
  "sao_sequence_mean": _SEQUENCES,
  "sao_mask_over_age": {"rollout.max_staleness": 4, "rollout.staleness": "mask"},
  "grpo_dis": _GROUPS,
  "grpo": _GRPO,
  "dapo": _GRPO | {"algorithm.policy_loss_reduction": "token_mean", "rollout.filter_equal_groups": True},
  "dr_grpo": _GRPO | {
    "algorithm.advantage": "dr_grpo", "algorithm.policy_loss_reduction": "constant", "algorithm.loss_length": 4096,
  },
  "cispo": _GROUPS | {"algorithm.policy_loss": "cispo", "algorithm.epsilon_low": 1.0, "algorithm.epsilon_high": 0.28},
  "gspo": _GRPO | {"algorithm.policy_loss": "gspo", "algorithm.epsilon_low": 3e-4, "algorithm.epsilon_high": 4e-4},
  "vapo": _PLAIN_CRITIC | _CLIP_HIGHER,
  "ppo": _CLIP_HIGHER | {
    "algorithm.epsilon_high": 0.2, "algorithm.policy_lambda": 0.95, "algorithm.value_clip": 0.2,
    "algorithm.freeze_attention": False,
  },
  "compaction_rl": _CLIP_HIGHER | {
    "algorithm.gae": "segments", "algorithm.epsilon_high": 0.2, "algorithm.freeze_attention": False,
  },
  "running_mean": _RUNNING_MEAN,
  "running_mean_global": _RUNNING_MEAN | {"algorithm.baseline_scope": "global", "algorithm.baseline_window": 128},
}  # fmt: skip


# What every method is told by. A configuration may have chosen another: those that say nothing of it have SAO's.
_SAO: Fields = {
  "algorithm.advantage": "sao", "algorithm.policy_loss": "dis", "algorithm.policy_loss_reduction": "token_mean",
}  # fmt: skip


def method_fields(name: str) -> Fields:
  """Returns the fields that a method sets, by their dotted paths, whatever the method of the configuration was.

  Raises:
    ConfigError: there is no such method.
  """
  if name not in METHODS:
    raise ConfigError("--method", f"there is no {name!r}.", config_tree.nearest(name, tuple(METHODS)))
  return _SAO | METHODS[name]
