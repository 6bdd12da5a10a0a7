"""A family of published models: how its config.json is read and written, and how its tensors are named and stored.

A family is one module with a `FAMILY`, listed in families/__init__.py. Its tables say for each of our parameters which
tensor holds it: `matrix`, `vector` or `unchanged`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from sao_jax.config import ModelConfig
from sao_jax.errors import ConfigError
from sao_jax.huggingface.families.fields import Declared, Fields
from sao_jax.parallel.params import Specs, path_name

# The fields of ModelConfig that a folder decides. The others are choices of a run, which a folder knows nothing about;
# tests/huggingface/test_families.py lists those, so that a new field has to join one of the two.
SHAPE = (
  *("vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "num_dense_layers"),
  *("num_experts", "num_experts_per_token", "d_ff_expert", "d_ff_shared", "renormalize_router", "router"),
  *("num_expert_groups", "num_groups_per_token", "routed_scaling", "qk_norm"),
  *("attention_bias", "attention_out_bias", "tie_embeddings"),
  *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk"),
  *("index_num_heads", "index_head_dim", "indexer_types", "rope_theta", "rotary_fraction", "yarn", "max_positions"),
  *("rms_norm_eps", "initializer_range"),
)

DEFAULT_MODEL = ModelConfig()

# The shape fields without effect in a dense model.
_OF_EXPERTS = (
  *("num_experts_per_token", "d_ff_expert", "d_ff_shared", "num_dense_layers", "renormalize_router", "router"),
  *("num_expert_groups", "num_groups_per_token", "routed_scaling"),
)


@dataclasses.dataclass(frozen=True)
class Tensor:
  """The place and layout of one of our parameters in a folder; made by `matrix`, `vector` or `unchanged`.

  Attributes:
    name: the tensor's name; it contains "{layer}" (and "{expert}") where our parameter stacks layers (and experts).
    inputs: number of axes that our parameter contracts, not counting stacked ones; 0 for a vector. None: the tensor has
      the axes of the parameter.
    layers: the model's layer of each entry of the first stacked axis; () where layers are not stacked.
    num_experts: length of the second stacked axis; 0 without one.
    keep_float32: True if the tensor is stored in fp32, whatever the dtype of the others.
  """

  name: str
  inputs: int | None
  layers: tuple[int, ...] = ()
  num_experts: int = 0
  keep_float32: bool = False

  @property
  def num_stacked(self) -> int:
    """Number of leading axes of the parameter whose entries are tensors of their own: 0, 1 or 2."""
    return bool(self.layers) + bool(self.num_experts)

  def name_at(self, position: tuple[int, ...]) -> str:
    """Names the tensor that holds the entry at `position` of the stacked axes."""
    layer = self.layers[position[0]] if self.layers else None
    return self.name.format(layer=layer, expert=position[1] if self.num_experts else None)

  def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of each tensor, given that of the parameter."""
    item = shape[self.num_stacked :]
    if self.inputs is None:
      return item
    outputs = math.prod(item[self.inputs :])
    return (outputs, math.prod(item[: self.inputs])) if self.inputs else (outputs,)


def matrix(name: str, inputs: int = 1) -> Tensor:
  """A matrix, stored as [outputs, inputs] like those of torch; ours is [*inputs, *outputs].

  The first `inputs` axes of our parameter are contracted: 1 for q [D, H, d], 2 for the output projection [H, d, D].
  """
  return Tensor(name, inputs)


def vector(name: str) -> Tensor:
  """A vector of outputs (the scale of a norm, a bias), stored as [outputs]; ours is [*outputs]."""
  return Tensor(name, 0)


def unchanged(name: str) -> Tensor:
  """A tensor with the axes of our parameter in the same order (the embedding [V, D])."""
  return Tensor(name, None)


@dataclasses.dataclass(frozen=True)
class Family:
  """The format of one family.

  Attributes:
    model_type: the family's name in config.json.
    architecture: the class of its causal language models, named in config.json.
    defaults: the values of the fields that a config.json leaves out, as in the family's config class in transformers.
    read: takes the fields of a config.json, returns those of ModelConfig that differ from the defaults.
    write: the inverse of `read`, returns the fields of a config.json.
    tensors: a `Tensor` for each parameter. Those of layers are named from inside the layer on both sides: "moe/gate" is
      `matrix("mlp.experts.{expert}.gate_proj.weight")`.
    float32: parameters of layers that stay in fp32.
    beyond_trunk: takes the fields of a config.json, defaults filled in, returns the prefixes of the tensors that a
      folder may hold beside the model (those of multi-token prediction); import leaves them alone, export keeps them.
    layers: takes a configuration and a parameter's full name, returns the layers of the model that it stacks.
    other_types: further names in config.json, of models in the same format.
  """

  model_type: str
  architecture: str
  defaults: Mapping[str, Any]
  read: Callable[[Fields], dict[str, Any]]
  write: Callable[[ModelConfig], dict[str, Any]]
  tensors: Mapping[str, Tensor]
  float32: frozenset[str] = frozenset()
  beyond_trunk: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda fields: ()
  layers: Callable[[ModelConfig, str], tuple[int, ...]] = lambda config, name: stacked_layers(config, name)
  other_types: tuple[str, ...] = ()

  def model_config(self, fields: Mapping[str, Any], model: ModelConfig = DEFAULT_MODEL) -> ModelConfig:
    """Returns `model` with the shape that a config.json gives; fields outside `SHAPE` stay.

    Raises:
      ConfigError: listing every field that is missing, unknown, or has a value that is not implemented.
    """
    reader = Fields(fields, self.defaults)
    shape = self.read(reader)
    reader.finish(self.model_type)
    return dataclasses.replace(model, **default_shape() | shape)

  def declared_fields(self) -> dict[str, Declared]:
    """Returns the declaration of every field of config.json that the family knows."""
    reader = Fields({}, self.defaults)
    self.read(reader)
    with contextlib.suppress(ConfigError):  # a file without fields need not be a model: a Mistral has a window then
      reader.finish(self.model_type)
    return reader.declared

  def prefixes_beyond_trunk(self, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the prefixes of the tensors that a folder with these fields may hold beside the model."""
    return self.beyond_trunk({**self.defaults, **fields})

  def tensor_table(self, config: ModelConfig, specs: Specs) -> dict[str, Tensor]:
    """Returns a `Tensor` for each parameter of `specs`, by its full name.

    `specs` declares a policy, or a critic without its head.
    """
    table = {}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs):
      name = path_name(path)
      group, _, inner = name.partition("/")
      if not group.endswith("_layers"):
        table[name] = self.tensors[name]
        continue

      # Parameters are stacked over the layers of their group, and over experts behind that.
      tensor = self.tensors[inner]
      table[name] = dataclasses.replace(
        tensor,
        name=f"model.layers.{{layer}}.{tensor.name}",
        layers=self.layers(config, name),
        num_experts=spec.shape[1] if "{expert}" in tensor.name else 0,
        keep_float32=inner in self.float32,
      )
    return table


def stacked_layers(config: ModelConfig, name: str) -> tuple[int, ...]:
  """Returns the layers of the model that a parameter in "dense_layers/..." or "moe_layers/..." stacks."""
  num_dense = config.num_dense_layers if config.num_experts else config.num_layers
  return tuple(range(num_dense)) if name.startswith("dense_layers/") else tuple(range(num_dense, config.num_layers))


def default_shape() -> dict[str, Any]:
  """Returns the defaults of the shape fields, which hold for those that a family does not set."""
  return {name: getattr(DEFAULT_MODEL, name) for name in SHAPE}


def shape_of(config: ModelConfig) -> dict[str, Any]:
  """Returns the shape fields of a configuration; in a dense model, those of experts have their defaults."""
  shape = {name: getattr(config, name) for name in SHAPE}
  if not config.num_experts:
    shape |= {name: default_shape()[name] for name in _OF_EXPERTS}
  return shape


def shape_differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
  """Describes, one string each, the shape fields in which two configurations differ."""
  first, second = shape_of(ours), shape_of(theirs)
  return [f"{name} is {first[name]}, not {second[name]}" for name in SHAPE if first[name] != second[name]]
