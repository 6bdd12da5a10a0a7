"""Rotary embeddings in a config.json, in the form of transformers 5 (rope_parameters) and in the older ones."""

from __future__ import annotations

from typing import Any

from sao_jax.config import ModelConfig, YarnConfig
from sao_jax.huggingface.families.fields import MISSING, Fields
from sao_jax.models.rope import yarn_mscale

THETA = 10_000.0  # the default of transformers
KEYS = (
  *("rope_theta", "rope_type", "type", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
  *("attention_factor", "beta_fast", "beta_slow", "short_factor", "long_factor", "low_freq_factor"),
  *("high_freq_factor", "mscale", "mscale_all_dim", "truncate"),
)


def read_rope(
  fields: Fields, *, yarn: bool = False, partial: float | None = None, latent: bool = False
) -> dict[str, Any]:
  """Reads rope_theta, rotary_fraction and yarn.

  Args:
    fields: the fields of a config.json.
    yarn: True if the family may be stretched, by YaRN or as Llama 3.1; any other scaling is refused.
    partial: the default of partial_rotary_factor in a family that rotates a part of its dimensions; None: it rotates
      all of them, whatever the field says.
    latent: True for latent attention, whose scores mscale_all_dim makes sharper.
  """
  # One of two objects decides: the older one where it holds anything.
  old, new = fields.section("rope_scaling"), fields.section("rope_parameters")
  rope = old if len(old) else new

  # A value beside the object counts where the object has none.
  theta = rope.take("rope_theta", fields.take("rope_theta", THETA, null=None), kind=float, null=None)
  fraction = fields.take("partial_rotary_factor", partial or 1.0, null=1.0)
  fraction = rope.take("partial_rotary_factor", fraction)
  outer = fields.take("original_max_position_embeddings", None, kind=int)
  if theta is None:
    rope.refuse("rope_theta", None)
    theta = THETA
  if fraction > 1.0:
    rope.refuse("partial_rotary_factor", fraction)
  read = {"rope_theta": theta, "rotary_fraction": fraction if partial else 1.0}

  # A stretched context where the family has it; of all other kinds only "default", which scales nothing.
  kind, read_scaling = rope.take("rope_type", rope.take("type", "default")), {"yarn": _read_yarn, "llama3": _read_llama}
  if kind in read_scaling and yarn:
    read["yarn"] = read_scaling[kind](rope, fields.take("max_position_embeddings"), outer, latent)
    if fraction != 1.0 and not partial:
      rope.refuse("partial_rotary_factor", fraction)  # transformers cannot run it
  elif kind != "default":
    rope.refuse("rope_type", kind)
  rope.irrelevant(*KEYS)
  fields.close(rope)
  return read


def _read_llama(rope: Fields, max_positions: int, outer: int | None, latent: bool) -> YarnConfig:
  """Reads the settings of Llama 3.1, whose rotary embeddings keep their size; the arguments are those of YaRN."""
  mscale_all_dim = rope.take("mscale_all_dim", None, kind=float, least=0)
  yarn = YarnConfig(
    factor=rope.take("factor", MISSING, kind=float),
    original_positions=outer or rope.take("original_max_position_embeddings", max_positions),
    beta_fast=rope.take("high_freq_factor", MISSING, kind=float),
    beta_slow=rope.take("low_freq_factor", MISSING, kind=float),
    attention_factor=1.0,
    ramp="turns",
    mscale_all_dim=(mscale_all_dim or 0.0) if latent else 0.0,
  )
  if yarn.factor < 1.0:
    rope.refuse("factor", yarn.factor)
  if yarn.beta_fast <= yarn.beta_slow:
    rope.refuse("high_freq_factor", yarn.beta_fast)
  return YarnConfig() if yarn.factor == 1.0 else yarn


def _read_yarn(rope: Fields, max_positions: int, outer: int | None, latent: bool) -> YarnConfig:
  """Reads the settings of YaRN; those that stretch nothing give the default.

  Args:
    rope: the object with the settings.
    max_positions: max_position_embeddings, for a file that does not name the positions of pretraining.
    outer: original_max_position_embeddings beside the object, which counts first.
    latent: as in `read_rope`.
  """
  original = outer or rope.take("original_max_position_embeddings", max_positions)
  factor = rope.take("factor", kind=float, null=max_positions / original)
  if factor < 1.0:
    rope.refuse("factor", factor)

  # The factor on cos and sin: given, or the ratio of two (DeepSeek), or that of the paper.
  attention = rope.take("attention_factor", None, kind=float)
  mscale = rope.take("mscale", None, kind=float, least=0)
  mscale_all_dim = rope.take("mscale_all_dim", None, kind=float, least=0)
  if attention is None and mscale and mscale_all_dim:
    attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)

  yarn = YarnConfig(
    factor=factor,
    original_positions=original,
    beta_fast=rope.take("beta_fast", 32.0, null=32.0, least=0) or 32.0,
    beta_slow=rope.take("beta_slow", 1.0, null=1.0, least=0) or 1.0,
    attention_factor=attention or 0.0,
    truncate=rope.take("truncate", True, null=False),
    mscale_all_dim=(mscale_all_dim or 0.0) if latent else 0.0,
  )
  return YarnConfig() if factor == 1.0 and yarn.attention_factor in (0.0, 1.0) else yarn


def write_rope(config: ModelConfig) -> dict[str, Any]:
  """Returns rope_theta and rope_scaling, which is None where nothing is stretched."""
  yarn = config.yarn
  scaling = None if yarn == YarnConfig() else _write_llama(yarn) if yarn.ramp == "turns" else _write_yarn(yarn)
  return {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def _write_llama(yarn: YarnConfig) -> dict[str, Any]:
  scaling = {
    "rope_type": "llama3",
    "factor": yarn.factor,
    "original_max_position_embeddings": yarn.original_positions,
    "high_freq_factor": yarn.beta_fast,
    "low_freq_factor": yarn.beta_slow,
  }
  return scaling | ({"mscale_all_dim": yarn.mscale_all_dim} if yarn.mscale_all_dim else {})


def _write_yarn(yarn: YarnConfig) -> dict[str, Any]:
  scaling = {
    "rope_type": "yarn",
    "factor": yarn.factor,
    "original_max_position_embeddings": yarn.original_positions,
    "beta_fast": yarn.beta_fast,
    "beta_slow": yarn.beta_slow,
    "truncate": yarn.truncate,
  }
  if yarn.mscale_all_dim:
    scaling["mscale_all_dim"] = yarn.mscale_all_dim

  # As DeepSeek writes that cos and sin keep their size: vLLM and SGLang read it from these two.
  if yarn.mscale_all_dim and yarn.attention_factor == 1.0:
    return scaling | {"mscale": yarn.mscale_all_dim}
  return scaling | ({"attention_factor": yarn.attention_factor} if yarn.attention_factor else {})
