"""Reading a config.json: every field is used, restricted to what is implemented, or known not to matter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sao_jax.config import YarnConfig
from sao_jax.errors import ConfigError

_REQUIRED = object()

# Fields that do not change what a model computes from token ids, or that the import reads elsewhere.
IRRELEVANT = (
  *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "quantization_config", "use_cache"),
  *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class", "_name_or_path", "_attn_implementation"),
  *("output_router_logits", "router_aux_loss_coef", "output_attentions", "output_hidden_states", "return_dict"),
)


class Fields:
  """The fields of a config.json, taken one by one; `finish` refuses those that nobody took.

  Problems are collected, so that one error lists all of them.
  """

  def __init__(self, values: Mapping[str, Any], prefix: str = ""):
    self._values, self._prefix = values, prefix
    self._left = set(values)
    self._problems: list[str] = []

  def __contains__(self, name: str) -> bool:
    return self._values.get(name) is not None

  def take(self, name: str, default: Any = _REQUIRED) -> Any:
    """Returns the field's value, or `default` where it is absent or null; without a default it is required."""
    self._left.discard(name)
    value = self._values.get(name)
    if value is None and default is _REQUIRED:
      self._problems.append(f"{self._prefix}{name} is missing")
      return 1  # lets the reader go on and find more problems; finish() raises
    return default if value is None else value

  def only(self, name: str, *implemented: Any) -> None:
    """Refuses all values of the field but these; a field that is absent or null means the first one."""
    value = self.take(name, implemented[0])
    if value not in implemented:
      self.refuse(name, value)

  def irrelevant(self, *names: str) -> None:
    """Accepts these fields with any value: they do not matter here."""
    self._left.difference_update(names)

  def refuse(self, name: str, value: Any) -> None:
    """Notes that this value of the field is not implemented."""
    self._problems.append(f"{self._prefix}{name} = {value!r} is not implemented")

  def finish(self, model_type: str) -> None:
    """Raises ConfigError, listing all fields that are missing, unknown or not implemented."""
    self.irrelevant(*IRRELEVANT)
    problems = self._problems + [f"{self._prefix}{name} is not known" for name in sorted(self._left)]
    if problems:
      raise ConfigError(
        f"config.json of {model_type}",
        "; ".join(problems) + ".",
        "Use a model without these; or, if a field does not change what the model computes, remove it from the file.",
      )

  def section(self, name: str) -> Fields:
    """Returns the fields inside a field; hand them to `close` when they are read."""
    return Fields(self.take(name), f"{self._prefix}{name}.")

  def close(self, section: Fields) -> None:
    """Takes over the problems of a section, and the fields that nobody took there."""
    self._problems += section._problems + [f"{section._prefix}{left} is not known" for left in sorted(section._left)]


def read_rope(fields: Fields, *, rotary_fraction: float = 1.0, yarn: bool = False) -> dict[str, Any]:
  """Reads rope_theta, rotary_fraction and yarn, in the form of transformers 5 (rope_parameters) or the older one.

  Args:
    fields: the fields of a config.json.
    rotary_fraction: the default of partial_rotary_factor.
    yarn: True if the family may be stretched by YaRN; any other scaling is refused.
  """
  # Both forms, as `rope` (theta and fraction) and `scaling` (its kind and numbers).
  if "rope_parameters" in fields:
    rope = scaling = fields.section("rope_parameters")
    fields.only("rope_scaling", None)
  else:
    rope, scaling = fields, fields.section("rope_scaling") if "rope_scaling" in fields else None
    fields.irrelevant("rope_scaling")  # null

  # Where both forms give a value, transformers takes that of rope_parameters.
  theta, fraction = fields.take("rope_theta", None), fields.take("partial_rotary_factor", rotary_fraction)
  if rope is not fields:
    theta, fraction = rope.take("rope_theta", theta), rope.take("partial_rotary_factor", fraction)
  if theta is None:
    theta = fields.take("rope_theta")  # notes that it is missing
  read = {"rope_theta": float(theta), "rotary_fraction": float(fraction)}

  # YaRN where the family has it; of all other kinds only "default", which scales nothing.
  if scaling is not None:
    kind = scaling.take("rope_type", None) or scaling.take("type", "default")
    scaling.irrelevant("type")
    if kind == "yarn" and yarn:
      read["yarn"] = YarnConfig(
        factor=float(scaling.take("factor")),
        original_positions=scaling.take("original_max_position_embeddings"),
        beta_fast=float(scaling.take("beta_fast", 32.0)),
        beta_slow=float(scaling.take("beta_slow", 1.0)),
        attention_factor=float(scaling.take("attention_factor", 0.0)),
        truncate=scaling.take("truncate", True),
      )
    elif kind != "default":
      scaling.refuse("rope_type", kind)
    fields.close(scaling)
  return read


def write_yarn(yarn: YarnConfig) -> dict[str, Any] | None:
  """Returns the value of rope_scaling; None where nothing is stretched."""
  if yarn.factor == 1.0:
    return None
  written = {
    "rope_type": "yarn",
    "factor": yarn.factor,
    "original_max_position_embeddings": yarn.original_positions,
    "beta_fast": yarn.beta_fast,
    "beta_slow": yarn.beta_slow,
    "truncate": yarn.truncate,
  }
  return written | ({"attention_factor": yarn.attention_factor} if yarn.attention_factor else {})
