"""LoRA of policy and critic: what each adapts, and what one needs of the other."""

from __future__ import annotations

from collections.abc import Iterator

from sao_jax.config import LoRAConfig, RunConfig
from sao_jax.errors import ConfigError


def lora_relations(config: RunConfig) -> Iterator[ConfigError]:
  """Yields the errors of "model.lora" and "critic.lora"."""
  policy, critic = config.model.lora, config.critic.lora
  for section, lora in (("model.lora", policy), ("critic.lora", critic)):
    if lora.rank and not lora.targets:
      yield ConfigError(
        f"{section}.targets",
        "there is nothing to adapt.",
        "Choose some of attention, mlp, as in \"('attention','mlp')\".",
      )

  # In RL the critic's attention is frozen.
  algorithm, only_attention = config.algorithm, set(critic.targets) == {"attention"}
  if algorithm.needs_critic and critic.rank and algorithm.freeze_attention and only_attention:
    yield ConfigError(
      "critic.lora.targets",
      "attention alone, which RL leaves as it is in the critic: nothing but its head would train.",
      "Add mlp, or set algorithm.freeze_attention=False.",
    )
  if config.shares_base:
    yield from _shared_base(policy, critic)


def _shared_base(policy: LoRAConfig, critic: LoRAConfig) -> Iterator[ConfigError]:
  """A critic on the policy's base starts as the policy is, so its factors must have room for the policy's."""
  reason = "a critic on the policy's base starts with the policy's factors"
  if critic.rank < policy.rank:
    yield ConfigError(
      "critic.lora.rank",
      f"{critic.rank} of model.lora.rank={policy.rank}: {reason}.",
      f"Raise it to {policy.rank} or more; 0 is a critic that trains in full.",
    )
  missing = [target for target in policy.targets if target not in critic.targets]
  if missing:
    yield ConfigError(
      "critic.lora.targets",
      f"no {', '.join(missing)}, which the policy adapts: {reason}.",
      f"Add {', '.join(missing)}; what algorithm.freeze_attention freezes does not train in RL, adapted or not.",
    )
