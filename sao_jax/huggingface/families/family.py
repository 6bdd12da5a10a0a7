"""What a family of published models is to us: how its config.json reads, and how its tensors are named and laid out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families.fields import Fields
from sao_jax.parallel.params import Specs, path_name

# The fields of ModelConfig that a folder decides. The others are choices of a run, which a folder knows nothing about.
SHAPE = (
  *("vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "num_dense_layers"),
  *("num_experts", "num_experts_per_token", "d_ff_expert", "d_ff_shared", "renormalize_router", "router"),
  *("num_expert_groups", "num_groups_per_token", "routed_scaling", "qk_norm", "attention_bias", "tie_embeddings"),
  *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk"),
  *("index_num_heads", "index_head_dim", "indexer_types", "rope_theta", "rotary_fraction", "yarn", "max_positions"),
  *("rms_norm_eps", "initializer_range"),
)

DEFAULT_MODEL = ModelConfig()

# What a dense model does not have.
_OF_EXPERTS = (
  *("num_experts_per_token", "d_ff_expert", "d_ff_shared", "num_dense_layers", "renormalize_router", "router"),
  *("num_expert_groups", "num_groups_per_token", "routed_scaling"),
)


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Where one parameter of ours lies in a folder.

  Attributes:
    name: the tensor's name; with "{layer}", and "{expert}", where our parameter is stacked.
    inputs: how many axes of the parameter (behind those stacked ones) the matrix contracts. It is stored as
      [outputs, inputs], ours is [*inputs, *outputs]; 0 is a vector of outputs; None: stored as it is.
    layers: the model's layer of every entry of the stacked axis; () where layers are not stacked.
    num_experts: length of the second stacked axis, 0 without one.
    keep_float32: stored in fp32 whatever the rest is stored in.
  """

  name: str
  inputs: int | None
  layers: tuple[int, ...] = ()
  num_experts: int = 0
  keep_float32: bool = False

  @property
  def num_stacked(self) -> int:
    """How many leading axes of the parameter are spread over tensors."""
    return bool(self.layers) + bool(self.num_experts)

  def name_at(self, position: tuple[int, ...]) -> str:
    """The tensor that holds the entry at `position` of the stacked axes."""
    layer = self.layers[position[0]] if self.layers else None
    return self.name.format(layer=layer, expert=position[1] if self.num_experts else None)

  def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of each tensor, from that of the parameter."""
    item = shape[self.num_stacked :]
    if self.inputs is None:
      return item
    outputs = math.prod(item[self.inputs :])
    return (outputs, math.prod(item[: self.inputs])) if self.inputs else (outputs,)


@dataclasses.dataclass(frozen=True)
class Family:
  """One family.

  Attributes:
    model_type: as config.json names it.
    architecture: of its causal language models, as config.json names it.
    read: takes the fields of a config.json, returns those of ModelConfig that differ from the defaults.
    write: the inverse, the fields of a config.json.
    tensors: per parameter, named as inside its layer ("moe/gate"), the tensor's name inside its layer
      ("mlp.experts.{expert}.gate_proj.weight"), and `Tensor.inputs`.
    float32: those that stay in fp32.
    beyond_trunk: takes the fields of a config.json, returns the prefixes of tensors that a folder may hold beside the
      model; they are left alone, and kept on export.
    layers: which layers of the model a parameter (by its full name) stacks.
  """

  model_type: str
  architecture: str
  read: Callable[[Fields], dict[str, Any]]
  write: Callable[[ModelConfig], dict[str, Any]]
  tensors: Mapping[str, tuple[str, int | None]]
  float32: frozenset[str] = frozenset()
  beyond_trunk: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda fields: ()
  layers: Callable[[ModelConfig, str], tuple[int, ...]] = lambda config, name: stacked_layers(config, name)

  def model_config(self, fields: Mapping[str, Any], model: ModelConfig = DEFAULT_MODEL) -> ModelConfig:
    """`model` with the shape that a config.json gives.

    Raises:
      ConfigError: listing every field that is missing, unknown, or has a value that is not implemented.
    """
    reader = Fields(fields)
    shape = self.read(reader)
    reader.finish(self.model_type)
    return dataclasses.replace(model, **default_shape() | shape)

  def tensor_table(self, config: ModelConfig, specs: Specs) -> dict[str, Tensor]:
    """Where every parameter of `specs` (of a policy, or of a value network without its head) is stored, by name."""
    table = {}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs):
      name = path_name(path)
      group, _, inner = name.partition("/")
      if not group.endswith("_layers"):
        table[name] = Tensor(*self.tensors[name])
        continue
      tensor, inputs = self.tensors[inner]
      experts = spec.shape[1] if "{expert}" in tensor else 0
      layers = self.layers(config, name)
      table[name] = Tensor(f"model.layers.{{layer}}.{tensor}", inputs, layers, experts, inner in self.float32)
    return table


def stacked_layers(config: ModelConfig, name: str) -> tuple[int, ...]:
  """The layers of the model that "dense_layers/..." or "moe_layers/..." stacks."""
  num_dense = config.num_dense_layers if config.num_experts else config.num_layers
  return tuple(range(num_dense)) if name.startswith("dense_layers/") else tuple(range(num_dense, config.num_layers))


def default_shape() -> dict[str, Any]:
  """The shape fields of ModelConfig with their defaults: what a family does not set has these values."""
  return {name: getattr(DEFAULT_MODEL, name) for name in SHAPE}


def shape_of(config: ModelConfig) -> dict[str, Any]:
  """The shape fields of a configuration; of a dense model those of experts at their defaults."""
  shape = {name: getattr(config, name) for name in SHAPE}
  if not config.num_experts:
    shape |= {name: default_shape()[name] for name in _OF_EXPERTS}
  return shape


def shape_differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
  """One line for every shape field in which two configurations differ."""
  first, second = shape_of(ours), shape_of(theirs)
  return [f"{name} is {first[name]}, not {second[name]}" for name in SHAPE if first[name] != second[name]]
