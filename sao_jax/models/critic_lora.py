"""A critic that trains as LoRA: factors of its own, its head in full, and no optimiser state for anything else.

Beside a policy that is LoRA, too, it has no base of its own: both read the same frozen matrices, which are stored,
sharded and saved once, with the policy. What may change of that base is not shared: the correction biases of routers,
which follow the policy's load. The critic keeps those that it began with.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sao_jax.config import LoRAConfig, ModelConfig
from sao_jax.models.critic import ADDED, critic_params_from_policy, new_head
from sao_jax.models.lora import lora_specs, merge_lora, widen_lora
from sao_jax.models.router import router_bias_paths
from sao_jax.parallel.params import Params, Specs, path_names


def critic_lora_specs(config: ModelConfig, specs: Specs, lora: LoRAConfig, *, shares_base: bool) -> Specs:
  """The parameters of a critic with "lora", from those of `critic_specs`; without the base if that is the policy's."""
  own = _never_shared(specs, config) if shares_base else specs
  return own | {"lora": lora_specs(specs, lora)}


def frozen_lora_paths(specs: Specs, frozen: frozenset[str]) -> frozenset[str]:
  """The leaves that stay fixed of the `specs` of a critic with "lora", by full name.

  These are the base and the scale, and the factors of matrices that are `frozen` in a critic without LoRA. Factors of
  frozen attention are there none the less: they hold what imitation and value pretraining made of it.
  """
  declared = set(path_names(specs))
  base = {path for path in declared if path.split("/")[0] not in (*ADDED, "lora")}
  factors = {f"lora/{factor}/{path}" for factor in ("a", "b") for path in frozen}
  return frozenset({*base, "lora/scale", *factors & declared})


def join_base(params: Params, policy_params: Params) -> Params:
  """All that a critic reads: its own parameters, and for those that it has not the policy's base; nothing is copied."""
  base = {name: tree for name, tree in policy_params.items() if name not in ("head", "lora")}
  return _laid_over(base, params)


def critic_lora_params(
  policy_params: Params, factors: Params, config: ModelConfig, *, shares_base: bool, **head: Any
) -> Params:
  """A critic with "lora" whose trunk starts by computing what the policy's does.

  Args:
    policy_params: with "lora" if the base is shared.
    factors: of the critic, before the first update. The first of them become those that the policy has by now.
    config: static.
    shares_base: leaves the base to the policy, see `join_base`.
    head: further arguments of `critic_params_from_policy`.
  """
  if not shares_base:
    whole = critic_params_from_policy(merge_lora(policy_params, keep_dtype=True), config, **head)
    return whole | {"lora": factors}
  own = _never_shared(policy_params | new_head(config, **head), config)
  return jax.tree.map(jnp.copy, own) | {"lora": widen_lora(factors, policy_params["lora"])}


def _never_shared(tree: Params | Specs, config: ModelConfig) -> Params | Specs:
  """The part of a critic's tree, its factors aside, that is its own in any case."""
  own = {name: tree[name] for name in ADDED if name in tree}
  if router_bias_paths(config):
    own["moe_layers"] = {"moe": {"correction_bias": tree["moe_layers"]["moe"]["correction_bias"]}}
  return own


def _laid_over(base: Params, own: Params) -> Params:
  """`base` with the leaves of `own` in place of its own, or beside them."""
  inside = {name: _laid_over(base[name], tree) for name, tree in own.items() if isinstance(base.get(name), dict)}
  return base | own | inside
