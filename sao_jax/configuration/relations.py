"""Refuses configurations that cannot work, before any work starts; here, how the fields relate to each other.

Each error names the field, what is wrong with it, and what to do. What depends on the mesh (its sizes, does it divide
the model, do the rows divide over it) is checked where the mesh is made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
from absl import logging

from sao_jax.config import AlgorithmConfig, ModelConfig, RunConfig
from sao_jax.configuration import config_tree
from sao_jax.configuration.bounds import check_bounds
from sao_jax.errors import ConfigError
from sao_jax.models.lora import TARGETS
from sao_jax.sampler.buckets import check_sampler_config


@dataclasses.dataclass(frozen=True)
class Rule:
  """A relation between fields: `broken(config)` says what is wrong, or None. `training`: only when training."""

  field: str
  broken: Callable[[RunConfig], str | None]
  remedy: str
  training: bool = False


def validate(config: RunConfig, *, training: bool) -> None:
  """Raises ConfigError for the first thing in `config` that cannot work.

  `training=False` (evaluation, sampling) allows temperature 0 and sampling filters.
  """
  config_tree.check_types(config)
  check_bounds(config)
  check_algorithm_config(config.algorithm)
  check_sampler_config(config.sampler)
  for rule in RULES:
    problem = rule.broken(config) if training or not rule.training else None
    if problem:
      raise ConfigError(rule.field, problem, rule.remedy)
  for hint in _hints(config):
    logging.warning("%s", hint)


def _environment(config: RunConfig) -> str | None:
  environment = config.environment
  frozen = config_tree.is_section(environment) and type(environment).__dataclass_params__.frozen
  if not frozen:
    return f"a {type(environment).__name__} is not an instance of a frozen dataclass."
  missing = [name for name in ("name", "make", "prompts", "tokenizer") if not hasattr(environment, name)]
  return f"{type(environment).__name__} has no {', '.join(missing)}." if missing else None


def _vocabulary(config: RunConfig) -> str | None:
  size = getattr(config.environment.tokenizer(), "vocab_size", 0)
  known = config.model.vocab_size
  return f"{known} rows do not hold the {size} tokens of the environment's tokenizer." if size > known else None


def _microbatches(config: RunConfig) -> str | None:
  parts, mesh = config.algorithm.micro_batches, config.mesh
  shards = mesh.data * mesh.fsdp * mesh.expert if min(mesh.data, mesh.fsdp, mesh.expert) > 0 else 1
  wrong = [count for count in config.rollout.row_counts if count % (parts * shards)]
  over = f"{parts} micro-batches" + (f" on {shards} batch shards of the mesh" if shards > 1 else "")
  return f"{wrong[0]} rows do not divide into {over}." if wrong else None


def _capacity(config: RunConfig) -> str | None:
  rollout, context = config.rollout, config.sampler.context_length
  rows, longest = max(rollout.row_counts), max(rollout.row_lengths)
  fit, batch = rows * (longest // context), max(rollout.batch_size, config.sft.batch_size)
  if fit >= batch:
    return None
  return f"{rows} rows of {longest} tokens surely hold {fit} trajectories of up to {context}, a batch has {batch}."


def _groups(config: RunConfig) -> str | None:
  model = config.model
  kept, groups, wanted = model.num_groups_per_token, model.num_expert_groups, model.num_experts_per_token
  if groups == 1 and kept == 1:
    return None
  size = model.num_experts // groups
  if size < 2:
    return f"groups of {size} experts have no two best ones to be compared by."
  if kept <= groups and kept * size >= wanted:
    return None
  return f"{kept} of {groups} groups of {size} experts, from which {wanted} experts are chosen."


def _split(config: RunConfig) -> str | None:
  if config.rollout.placement != "split":
    return None
  devices, sampler = jax.local_device_count(), config.rollout.sampler_devices
  return None if 0 < sampler < devices else f"{sampler} of {devices} local devices would sample."


def _deterministic(config: RunConfig) -> str | None:
  rollout, slots = config.rollout, config.sampler.num_slots
  if not rollout.deterministic:
    return None
  if 0 <= rollout.max_staleness < rollout.admission_staleness:
    return f"rollouts would be dropped for their age, which is {rollout.admission_staleness} versions in its rounds."
  if rollout.max_in_flight > slots:
    return f"{rollout.max_in_flight} episodes do not fit into {slots} slots at the same time."
  return None


def _lora(config: RunConfig) -> str | None:
  targets = config.model.lora.targets
  unknown = [target for target in targets if target not in TARGETS]
  if unknown:
    return f"there is no {unknown[0]!r}."
  return None if targets or not config.model.lora.rank else "there is nothing to adapt."


def _when(condition: Callable[[RunConfig], bool], problem: str) -> Callable[[RunConfig], str | None]:
  """A check that reports `problem`, a format string over the sections of the configuration."""
  return lambda config: problem.format(**vars(config)) if condition(config) else None


RULES: tuple[Rule, ...] = (
  Rule(
    "environment",
    _environment,
    "Give an instance of a frozen dataclass with `name`, `make`, `prompts` and `tokenizer`: sao_jax.environments.base.",
  ),
  Rule(
    "model.vocab_size", _vocabulary, "Set model.vocab_size to the tokenizer's size, or to a larger multiple of 128."
  ),
  Rule(
    "rollout.deterministic",
    _deterministic,
    "Raise rollout.max_staleness (or set it to -1), and leave rollout.max_in_flight at 0.",
  ),
  Rule(
    "model.num_heads",
    _when(
      lambda c: c.model.num_heads % c.model.num_kv_heads != 0,
      "{model.num_heads} heads do not share {model.num_kv_heads} key-value heads evenly.",
    ),
    "Make model.num_heads a multiple of model.num_kv_heads.",
  ),
  Rule(
    "model.head_dim",
    _when(lambda c: c.model.head_dim % 2 != 0, "{model.head_dim} is odd, rotary embeddings turn pairs."),
    "Use an even model.head_dim.",
  ),
  Rule(
    "model.rotary_fraction",
    _when(
      lambda c: int(c.model.head_dim * c.model.rotary_fraction) % 2 != 0,
      "{model.rotary_fraction} of {model.head_dim} dimensions is an odd number, rotary embeddings turn pairs.",
    ),
    "Choose a fraction of model.head_dim that is even.",
  ),
  Rule(
    "model.kv_lora_rank",
    lambda c: latent_problem(c.model),
    "Set all the widths of latent attention, or leave all of them at 0.",
  ),
  Rule(
    "model.index_topk",
    lambda c: indexer_problem(c.model),
    "Set model.index_num_heads and model.index_head_dim, or leave model.index_topk at 0.",
  ),
  Rule(
    "model.indexer_types",
    lambda c: indexer_types_problem(c.model),
    "Name full or shared for every layer, full for the first; or leave it empty: all are full.",
  ),
  Rule(
    "model.num_experts_per_token",
    _when(
      lambda c: 0 < c.model.num_experts < c.model.num_experts_per_token,
      "{model.num_experts_per_token} experts per token of {model.num_experts} experts.",
    ),
    "Lower model.num_experts_per_token or raise model.num_experts.",
  ),
  Rule(
    "model.router",
    _when(
      lambda c: c.model.router == "softmax" and (c.model.num_expert_groups > 1 or c.model.routed_scaling != 1.0),
      "the softmax router has no groups and no scaling of weights.",
    ),
    "Use model.router=sigmoid, or set model.num_expert_groups=1 and model.routed_scaling=1.",
  ),
  Rule(
    "model.num_expert_groups",
    _when(
      lambda c: c.model.num_experts % c.model.num_expert_groups != 0,
      "{model.num_experts} experts do not split into {model.num_expert_groups} groups.",
    ),
    "Make model.num_experts a multiple of model.num_expert_groups.",
  ),
  Rule("model.lora.targets", _lora, f"Choose some of {', '.join(TARGETS)}, as in \"('attention','mlp')\"."),
  Rule(
    "rollout.batch_size",
    _when(
      lambda c: c.rollout.batch_size % c.rollout.group_size != 0,
      "{rollout.batch_size} trajectories do not divide into groups of {rollout.group_size}.",
    ),
    "Make rollout.batch_size a multiple of rollout.group_size.",
  ),
  Rule(
    "rollout.group_size",
    _when(
      lambda c: c.algorithm.advantage == "grpo" and c.rollout.group_size < 2,
      "group-relative advantages compare the rollouts of a prompt, and there is {rollout.group_size} of each.",
    ),
    "Set rollout.group_size to 2 or more, as in 8, or use algorithm.advantage='sao'.",
  ),
  Rule(
    "algorithm.critic_warmup_steps",
    _when(
      lambda c: c.algorithm.advantage == "grpo" and c.algorithm.critic_warmup_steps > 0,
      "{algorithm.critic_warmup_steps} critic-only steps, and algorithm.advantage='grpo' has no critic.",
    ),
    "Pass --config.algorithm.critic_warmup_steps=0.",
  ),
  Rule(
    "algorithm.truncation",
    _when(
      lambda c: c.algorithm.advantage == "grpo" and c.algorithm.truncation == "bootstrap",
      "'bootstrap' continues a cut trajectory with the critic's value, and algorithm.advantage='grpo' has no critic.",
    ),
    "Use algorithm.truncation='zero' or 'mask'.",
  ),
  Rule(
    "algorithm.router_replay",
    _when(lambda c: c.algorithm.router_replay and not c.model.num_moe_layers, "this model has no layer with experts."),
    "Set it to False, or train a model with experts.",
  ),
  Rule(
    "algorithm.router_replay",
    _when(
      lambda c: c.algorithm.router_replay and c.model.num_experts > 2**15,
      "{model.num_experts} experts do not fit into the 16 bits in which they are recorded.",
    ),
    "Set it to False.",
  ),
  Rule(
    "algorithm.router_bias_update",
    _when(
      lambda c: c.algorithm.router_bias_update > 0 and not (c.model.router == "sigmoid" and c.model.num_moe_layers),
      "this model's router has no correction bias.",
    ),
    "Set it to 0, or train a model with experts and model.router=sigmoid.",
  ),
  Rule("model.num_groups_per_token", _groups, "A token needs enough groups for its experts, and at most all of them."),
  Rule(
    "model.num_dense_layers",
    _when(
      lambda c: c.model.num_dense_layers > c.model.num_layers,
      "{model.num_dense_layers} dense layers of {model.num_layers} layers.",
    ),
    "Use at most model.num_layers.",
  ),
  Rule(
    "sampler.temperature",
    _when(
      lambda c: c.sampler.temperature == 0, "training at temperature 0: a greedy policy has no ratio and no gradient."
    ),
    "Use a temperature above 0, as in the paper 1; evaluation.temperature may be 0.",
    training=True,
  ),
  Rule(
    "sampler.top_p",
    _when(
      lambda c: c.sampler.top_p < 1,
      "training with top_p={sampler.top_p}: the sampler would renormalise over the kept tokens, the trainer over all.",
    ),
    "Set sampler.top_p=1 for training.",
    training=True,
  ),
  Rule(
    "sampler.top_k",
    _when(
      lambda c: c.sampler.top_k > 0,
      "training with top_k={sampler.top_k}: the sampler would renormalise over the kept tokens, the trainer over all.",
    ),
    "Set sampler.top_k=0 for training.",
    training=True,
  ),
  Rule(
    "sampler.context_length",
    _when(
      lambda c: c.sampler.context_length > c.model.max_positions,
      "{sampler.context_length} tokens, the model is meant for {model.max_positions}.",
    ),
    "Lower sampler.context_length; model.max_positions may be raised for a model that knows such positions.",
  ),
  Rule(
    "rollout.row_lengths",
    lambda c: (
      f"the longest row has {max(c.rollout.row_lengths)} tokens, a trajectory may have {c.sampler.context_length}."
      if max(c.rollout.row_lengths) < c.sampler.context_length
      else None
    ),
    "Add sampler.context_length to rollout.row_lengths, or lower sampler.context_length.",
  ),
  Rule(
    "rollout.row_counts",
    _microbatches,
    "Make every row count a multiple of algorithm.micro_batches times mesh.data * mesh.fsdp * mesh.expert.",
  ),
  Rule(
    "rollout.row_counts",
    _capacity,
    "Append a larger row count (it costs nothing unless it is needed), or lower rollout.batch_size or sft.batch_size.",
  ),
  Rule(
    "rollout.sampler_devices",
    _split,
    "With placement='split' leave at least one local device to each side, or use placement='shared'.",
  ),
  Rule(
    "training.watchdog_seconds",
    _when(
      lambda c: c.training.watchdog_seconds <= c.rollout.environment_timeout,
      "after {training.watchdog_seconds} s the run would end, while an environment may still answer until "
      "{rollout.environment_timeout} s.",
    ),
    "Raise training.watchdog_seconds above rollout.environment_timeout.",
  ),
  Rule(
    "value_pretraining.max_steps",
    _when(
      lambda c: c.value_pretraining.max_steps < c.value_pretraining.min_steps,
      "at most {value_pretraining.max_steps} steps but at least {value_pretraining.min_steps}.",
    ),
    "Raise value_pretraining.max_steps to value_pretraining.min_steps or more.",
  ),
)


def _hints(config: RunConfig) -> Iterator[str]:
  """What works but is probably not meant."""
  rollout = config.rollout
  if rollout.staleness == "drop" and 0 <= rollout.max_staleness < rollout.admission_staleness:
    yield (
      f"rollout.max_staleness={rollout.max_staleness} is below rollout.admission_staleness="
      f"{rollout.admission_staleness}: long rollouts will be generated and then dropped, which biases training "
      "to short answers. Raise it, or use rollout.staleness='mask'."
    )


_WIDTHS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def latent_problem(model: ModelConfig) -> str | None:
  """Latent attention has all of its widths, and nothing that only grouped-query attention has."""
  if not model.kv_lora_rank:
    unused = [name for name in (*_WIDTHS, "index_topk") if getattr(model, name)]
    return f"it is 0: there is no latent attention, to which {', '.join(unused)} belong." if unused else None
  missing = [name for name in _WIDTHS if not getattr(model, name)]
  if missing:
    return f"latent attention needs {', '.join(missing)} as well."
  if model.qk_rope_head_dim % 2:
    return f"qk_rope_head_dim is {model.qk_rope_head_dim}, an odd number; rotary embeddings turn pairs."
  if model.num_kv_heads != model.num_heads:
    return f"latent attention has as many key-value heads as heads, not {model.num_kv_heads} of {model.num_heads}."
  if model.attention_bias or model.rotary_fraction != 1.0 or model.yarn.factor != 1.0:
    return "attention_bias, rotary_fraction and yarn are not implemented for latent attention."
  return None


def indexer_problem(model: ModelConfig) -> str | None:
  """An indexer has heads, wide enough for the rotary part."""
  if model.index_topk and (not model.index_num_heads or model.index_head_dim < model.qk_rope_head_dim):
    widths = f"{model.index_num_heads} heads of {model.index_head_dim} dimensions"
    return f"an indexer of {widths} cannot hold the {model.qk_rope_head_dim} that are rotated."
  return None


def indexer_types_problem(model: ModelConfig) -> str | None:
  """Every layer has a kind, and the first one an indexer."""
  kinds = model.indexer_types
  if not kinds:
    return None
  if not model.index_topk:
    return "index_topk=0 leaves indexers out."
  if len(kinds) != model.num_layers or set(kinds) - {"full", "shared"}:
    return f"it names {len(kinds)} kinds of {model.num_layers} layers: {', '.join(sorted(set(kinds)))}."
  return "the first layer is shared, and there is none before it." if kinds[0] == "shared" else None


def check_algorithm_config(config: AlgorithmConfig) -> None:
  """Raises ConfigError for the first setting that is out of range or contradicts another."""

  def check(field: str, valid: bool, rule: str) -> None:
    if not valid:
      raise ConfigError(f"algorithm.{field}", f"{getattr(config, field)!r} cannot work.", f"Set it to {rule}.")

  check("epsilon_low", 0.0 < config.epsilon_low <= 1.0, "a delta in (0, 1]; tokens with ratio <= 1 - delta are dropped")
  check("epsilon_high", config.epsilon_high > 0.0, "a delta > 0; tokens with ratio >= 1 + delta are dropped")
  check("gamma", 0.0 <= config.gamma <= 1.0, "a discount in [0, 1]")
  check("alpha", 1.0 <= config.alpha < math.inf, "a number >= 1; smaller ones make lambda = 1 - 1/(alpha n) negative")
  check("critic_lambda", 0.0 <= config.critic_lambda <= 1.0, "a number in [0, 1]")
  check("value_updates", config.value_updates >= 1, "at least 1 critic update per step")
  check("advantage_values", config.advantage_values in ("post", "pre"), "'post' or 'pre'")
  check("truncation", config.truncation in ("zero", "bootstrap", "mask"), "'zero', 'bootstrap' or 'mask'")
  check("value_head", config.value_head in ("scalar", "hl_gauss"), "'scalar' or 'hl_gauss'")
  check("value_clip", config.value_clip >= 0.0, "a range >= 0, where 0 turns the clip off")
  check("micro_batches", config.micro_batches >= 1, "at least 1")
  if config.value_head == "hl_gauss":
    check("value_clip", config.value_clip == 0.0, "0 with value_head='hl_gauss', which has no squared error to clip")
    check("value_bins", config.value_bins >= 6, "at least 6 bins")
    check("value_max", config.value_min < config.value_max, "more than value_min; together the range of the returns")
