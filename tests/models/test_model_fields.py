"""Every field of the model's configuration is read where networks are declared and computed."""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
from toys import glm5_toy, transformer_toy

from sao_jax.config import LoRAConfig, ModelConfig, YarnConfig
from sao_jax.models.lora import lora_specs
from sao_jax.models.policy import make_policy_apply
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import abstract_params, init_params
from sao_jax.types import TrajectoryBatch

# Read by the validation of a run, and by the start of a phase.
ELSEWHERE = {"max_positions", "checkpoint"}
GROUPED = dataclasses.replace(
  transformer_toy.MOE,
  router="sigmoid",
  num_expert_groups=2,
  attention_out_bias=True,
  yarn=YarnConfig(factor=2.0),
  lora=LoRAConfig(rank=2),
)


def watched(section, reads: set[str], prefix: str = ""):
  """The same section, which notes what is read of it; comparing, hashing and replacing fields reads nothing."""
  kind = type(section)
  names = {field.name for field in dataclasses.fields(kind)}

  class Watched(kind):
    __hash__, __eq__ = object.__hash__, object.__eq__

    def __getattribute__(self, name):
      if name in names and sys._getframe(1).f_globals.get("__name__") != "dataclasses":
        reads.add(prefix + name)
      return super().__getattribute__(name)

  inner = {name: getattr(section, name) for name in names}
  for name, value in inner.items():
    if dataclasses.is_dataclass(value):
      inner[name] = watched(value, reads, f"{prefix}{name}.")
  return Watched(**inner)


def reads_of(config: ModelConfig) -> set[str]:
  """The fields that are read while a policy of this model is declared and traced."""
  reads: set[str] = set()
  config = watched(config, reads)
  specs = param_specs(config)
  if config.lora.rank:
    specs = specs | {"lora": lora_specs(specs, config.lora)}
  rows, flags, numbers = (jax.ShapeDtypeStruct((2, 6), dtype) for dtype in (jnp.int32, jnp.bool_, jnp.float32))
  batch = TrajectoryBatch(
    **dict.fromkeys(("token_ids", "segment_ids", "trajectory_ids", "positions", "policy_version"), rows),
    **dict.fromkeys(("action_mask", "loss_mask", "truncated"), flags),
    **dict.fromkeys(("behavior_logprobs", "rewards"), numbers),
  )
  jax.eval_shape(lambda: init_params(specs, jax.random.key(0)))
  jax.eval_shape(make_policy_apply(config), abstract_params(specs), batch)
  return reads


def test_no_field_is_without_effect():
  reads = set.union(*(reads_of(config) for config in (transformer_toy.SMALL, GROUPED, glm5_toy.TINY)))
  sections = {"yarn": YarnConfig, "lora": LoRAConfig}
  fields = {field.name for field in dataclasses.fields(ModelConfig)}
  fields |= {f"{name}.{field.name}" for name, kind in sections.items() for field in dataclasses.fields(kind)}
  assert fields - reads == ELSEWHERE
