"""Refuses configurations that cannot work, before any work starts; here, how the fields relate to each other.

Each error names the field, what is wrong with it, and what to do. What a field may be by itself stands in config.py.
What depends on the mesh (its sizes, does it divide the model, do the rows divide over it) is checked where the mesh is
made.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from absl import logging

from sao_jax.config import ModelConfig, RunConfig, SamplerConfig
from sao_jax.configuration import config_tree
from sao_jax.configuration.algorithm_relations import algorithm_relations
from sao_jax.configuration.bounds import check_bounds
from sao_jax.configuration.hints import hints
from sao_jax.configuration.lora_relations import lora_relations
from sao_jax.configuration.tool_relations import tool_relations
from sao_jax.errors import ConfigError

_LATENT_WIDTHS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_RECORDED_EXPERTS = 2**15  # experts are recorded as int16


def validate(config: RunConfig, *, training: bool) -> None:
  """Raises ConfigError for the first thing in `config` that cannot work; in training logs what is probably not meant.

  Call it once, where a program or a library function begins. `training=False` (evaluation, sampling) allows
  temperature 0 and sampling filters.
  """
  config_tree.check_types(config)
  check_bounds(config)
  for error in broken_relations(config, training=training):
    raise error
  for hint in hints(config) if training else ():
    logging.warning("%s", hint)


def broken_relations(config: RunConfig, *, training: bool) -> Iterator[ConfigError]:
  """Yields the errors of fields that do not fit each other; types and bounds are taken for granted.

  An error may follow from the one before it, so only the first is sure to be meant.
  """
  yield from _environment(config)
  yield from _attention(config.model)
  yield from _latent_attention(config.model)
  yield from _experts(config.model)
  yield from lora_relations(config)
  yield from _router(config)
  yield from algorithm_relations(config)
  if training:
    yield from _kept(config)
    yield from _trackers(config.training.trackers)
    yield from _ratios(config.sampler)
    yield from _sampler_groups(config)
  yield from _lengths(config)
  yield from _batches(config)
  yield from _rollouts(config)
  yield from _durations(config)
  yield from tool_relations(config)
  yield from _value_pretraining(config)
  yield from _profile(config.training.profile_steps)


# Environment


def _environment(config: RunConfig) -> Iterator[ConfigError]:
  environment, name = config.environment, type(config.environment).__name__
  remedy = "Give an instance of a frozen dataclass with `name`, `make`, `prompts` and `tokenizer`: "
  remedy += "sao_jax.environments.base."
  if not (config_tree.is_section(environment) and type(environment).__dataclass_params__.frozen):
    yield ConfigError("environment", f"a {name} is not an instance of a frozen dataclass.", remedy)
  missing = [member for member in ("name", "make", "prompts", "tokenizer") if not hasattr(environment, member)]
  if missing:
    yield ConfigError("environment", f"{name} has no {', '.join(missing)}.", remedy)

  tokens, rows = getattr(environment.tokenizer(), "vocab_size", 0), config.model.vocab_size
  if tokens > rows:
    yield ConfigError(
      "model.vocab_size",
      f"{rows} rows do not hold the {tokens} tokens of the environment's tokenizer.",
      "Set model.vocab_size to the tokenizer's size, or to a larger multiple of 128.",
    )


# Model


def _attention(model: ModelConfig) -> Iterator[ConfigError]:
  if model.num_heads % model.num_kv_heads:
    yield ConfigError(
      "model.num_heads",
      f"{model.num_heads} heads do not share {model.num_kv_heads} key-value heads evenly.",
      "Make model.num_heads a multiple of model.num_kv_heads.",
    )

  # Rotary embeddings turn pairs of dimensions.
  if model.head_dim % 2:
    yield ConfigError(
      "model.head_dim", f"{model.head_dim} is odd, rotary embeddings turn pairs.", "Use an even model.head_dim."
    )
  if int(model.head_dim * model.rotary_fraction) % 2:
    yield ConfigError(
      "model.rotary_fraction",
      f"{model.rotary_fraction} of {model.head_dim} dimensions is an odd number, rotary embeddings turn pairs.",
      "Choose a fraction of model.head_dim that is even.",
    )


def _latent_attention(model: ModelConfig) -> Iterator[ConfigError]:
  problem = _latent_problem(model)
  if problem:
    remedy = "Set all the widths of latent attention, or leave all of them at 0."
    yield ConfigError("model.kv_lora_rank", problem, remedy)

  # An indexer has heads, wide enough for the rotary part.
  if model.index_topk and (not model.index_num_heads or model.index_head_dim < model.qk_rope_head_dim):
    widths = f"{model.index_num_heads} heads of {model.index_head_dim} dimensions"
    yield ConfigError(
      "model.index_topk",
      f"an indexer of {widths} cannot hold the {model.qk_rope_head_dim} that are rotated.",
      "Set model.index_num_heads and model.index_head_dim, or leave model.index_topk at 0.",
    )
  problem = _indexer_types_problem(model)
  if problem:
    remedy = "Name full or shared for every layer, full for the first; or leave it empty: all are full."
    yield ConfigError("model.indexer_types", problem, remedy)


def _latent_problem(model: ModelConfig) -> str | None:
  """Latent attention has all of its widths, and nothing that only grouped-query attention has."""
  if not model.is_latent:
    unused = [name for name in (*_LATENT_WIDTHS, "index_topk") if getattr(model, name)]
    return f"it is 0: there is no latent attention, to which {', '.join(unused)} belong." if unused else None
  missing = [name for name in _LATENT_WIDTHS if not getattr(model, name)]
  if missing:
    return f"latent attention needs {', '.join(missing)} as well."
  if model.qk_rope_head_dim % 2:
    return f"qk_rope_head_dim is {model.qk_rope_head_dim}, an odd number; rotary embeddings turn pairs."
  if model.num_kv_heads != model.num_heads:
    return f"latent attention has as many key-value heads as heads, not {model.num_kv_heads} of {model.num_heads}."
  if model.attention_bias or model.attention_out_bias or model.rotary_fraction != 1.0:
    return "attention_bias, attention_out_bias and rotary_fraction are not implemented for latent attention."
  return None


def _indexer_types_problem(model: ModelConfig) -> str | None:
  """Every layer has a kind, and the first one an indexer."""
  kinds = model.indexer_types
  if not kinds:
    return None
  if not model.index_topk:
    return "index_topk=0 leaves indexers out."
  if len(kinds) != model.num_layers:
    return f"it names {len(kinds)} kinds of {model.num_layers} layers: {', '.join(sorted(set(kinds)))}."
  return "the first layer is shared, and there is none before it." if kinds[0] == "shared" else None


def _experts(model: ModelConfig) -> Iterator[ConfigError]:
  experts, per_token, groups = model.num_experts, model.num_experts_per_token, model.num_expert_groups
  if 0 < experts < per_token:
    yield ConfigError(
      "model.num_experts_per_token",
      f"{per_token} experts per token of {experts} experts.",
      "Lower model.num_experts_per_token or raise model.num_experts.",
    )
  if model.num_dense_layers > model.num_layers:
    yield ConfigError(
      "model.num_dense_layers",
      f"{model.num_dense_layers} dense layers of {model.num_layers} layers.",
      "Use at most model.num_layers.",
    )

  # Groups of experts, of which a token chooses some before it chooses experts.
  if model.router == "softmax" and (groups > 1 or model.routed_scaling != 1.0):
    yield ConfigError(
      "model.router",
      "the softmax router has no groups and no scaling of weights.",
      "Use model.router=sigmoid, or set model.num_expert_groups=1 and model.routed_scaling=1.",
    )
  if experts % groups:
    yield ConfigError(
      "model.num_expert_groups",
      f"{experts} experts do not split into {groups} groups.",
      "Make model.num_experts a multiple of model.num_expert_groups.",
    )
  problem = _groups_problem(experts // groups, groups, model.num_groups_per_token, per_token)
  if problem:
    remedy = "A token needs enough groups for its experts, and at most all of them."
    yield ConfigError("model.num_groups_per_token", problem, remedy)


def _groups_problem(size: int, groups: int, kept: int, per_token: int) -> str | None:
  """Groups of `size` experts are ranked by their two best, and those kept hold all experts of a token."""
  if groups == 1 and kept == 1:
    return None
  if size < 2:
    return f"groups of {size} experts have no two best ones to be compared by."
  if kept <= groups and kept * size >= per_token:
    return None
  return f"{kept} of {groups} groups of {size} experts, from which {per_token} experts are chosen."


# Algorithm


def _router(config: RunConfig) -> Iterator[ConfigError]:
  algorithm, model = config.algorithm, config.model
  # Experts that the sampler records for the learner.
  if algorithm.router_replay and not model.num_moe_layers:
    yield ConfigError(
      "algorithm.router_replay",
      "this model has no layer with experts.",
      "Set it to False, or train a model with experts.",
    )
  if algorithm.router_replay and model.num_experts > _RECORDED_EXPERTS:
    yield ConfigError(
      "algorithm.router_replay",
      f"{model.num_experts} experts do not fit into the 16 bits in which they are recorded.",
      "Set it to False.",
    )

  if algorithm.router_bias_update > 0 and not (model.router == "sigmoid" and model.num_moe_layers):
    yield ConfigError(
      "algorithm.router_bias_update",
      "this model's router has no correction bias.",
      "Set it to 0, or train a model with experts and model.router=sigmoid.",
    )


# Sampler


def _ratios(sampler: SamplerConfig) -> Iterator[ConfigError]:
  """In training, the sampler's log-probs are those of the policy, for all tokens."""
  if sampler.temperature == 0:
    yield ConfigError(
      "sampler.temperature",
      "training at temperature 0: a greedy policy has no ratio and no gradient.",
      "Use a temperature above 0, as in the paper 1; evaluation.temperature may be 0.",
    )
  for name, off in (("top_p", 1), ("top_k", 0)):
    value = getattr(sampler, name)
    if value != off:
      yield ConfigError(
        f"sampler.{name}",
        f"training with {name}={value}: the sampler would renormalise over the kept tokens, the trainer over all.",
        f"Set sampler.{name}={off} for training.",
      )


def _lengths(config: RunConfig) -> Iterator[ConfigError]:
  context, longest = config.sampler.context_length, max(config.rollout.row_lengths)
  if context > config.model.longest_context:
    yield ConfigError(
      "sampler.context_length",
      f"{context} tokens, the model is meant for {config.model.longest_context}.",
      "Lower sampler.context_length, or stretch the model by YaRN: model.yarn, in a folder's config.json rope_scaling. "
      "A model that knows more positions than it says needs a larger model.max_positions, in a folder "
      "max_position_embeddings of config.json.",
    )
  if longest < context:
    yield ConfigError(
      "rollout.row_lengths",
      f"the longest row has {longest} tokens, a context may have {context}.",
      "Add sampler.context_length to rollout.row_lengths, or lower sampler.context_length.",
    )
  total = config.rollout.max_trajectory_tokens
  if 0 < total < context:
    yield ConfigError(
      "rollout.max_trajectory_tokens",
      f"{total} tokens in all contexts of an episode, and one context may have {context}.",
      "Set it to sampler.context_length or more, or to 0 for no bound.",
    )
  tokens = config.sampler.num_pages * config.sampler.page_size
  if 0 < tokens < context:
    yield ConfigError(
      "sampler.num_pages",
      f"pages for {tokens} tokens, and one context may have {context}.",
      "Raise it, or set it to 0: as many as all slots need.",
    )


# Rollouts


def _batches(config: RunConfig) -> Iterator[ConfigError]:
  parts, mesh, rollout = config.algorithm.micro_batches, config.mesh, config.rollout
  # -1 is known where the mesh is made, which checks the rows again.
  shards = mesh.data * mesh.fsdp * mesh.expert if min(mesh.data, mesh.fsdp, mesh.expert) > 0 else 1
  uneven = [count for count in rollout.row_counts if count % (parts * shards)]
  if uneven:
    over = f"{parts} micro-batches" + (f" on {shards} batch shards of the mesh" if shards > 1 else "")
    yield ConfigError(
      "rollout.row_counts",
      f"{uneven[0]} rows do not divide into {over}.",
      "Make every row count a multiple of algorithm.micro_batches times mesh.data * mesh.fsdp * mesh.expert.",
    )

  # The largest batch fits even if every trajectory fills a context. Those whose history is rewritten may be longer: a
  # batch that needs more rows gets them, at the price of another compilation.
  rows, longest, context = max(rollout.row_counts), max(rollout.row_lengths), config.sampler.context_length
  demonstrated = config.sft.batch_size if hasattr(config.environment, "demonstration") else 0
  fit, batch = rows * (longest // context), max(rollout.batch_size, demonstrated)
  if fit < batch:
    yield ConfigError(
      "rollout.row_counts",
      f"{rows} rows of {longest} tokens surely hold {fit} trajectories of up to {context}, a batch has {batch}.",
      "Append a larger row count (it costs nothing unless it is needed), or lower rollout.batch_size or "
      "sft.batch_size.",
    )


def _rollouts(config: RunConfig) -> Iterator[ConfigError]:
  rollout, slots = config.rollout, config.sampler.num_slots
  # In rounds, every rollout is used, and all of a round run at the same time.
  if rollout.deterministic:
    remedy = "Raise rollout.max_staleness (or set it to -1), and leave rollout.max_in_flight at 0."
    if 0 <= rollout.max_staleness < rollout.admission_staleness:
      oldest = f"{rollout.admission_staleness} versions in its rounds"
      yield ConfigError("rollout.deterministic", f"rollouts would be dropped for their age, which is {oldest}.", remedy)
    if config.evaluation.sampler == "shared":
      shared = "an evaluation in the rollouts' slots would change what is sampled together."
      yield ConfigError("rollout.deterministic", shared, "Set evaluation.sampler='own'.")
    if rollout.max_in_flight > slots:
      over = f"{rollout.max_in_flight} episodes do not fit into {slots} slots at the same time."
      yield ConfigError("rollout.deterministic", over, remedy)

  if rollout.placement == "split" and not (rollout.sampler_hosts and _hosts() > 1):
    devices = _local_devices()
    if not 0 < rollout.sampler_devices < devices:
      yield ConfigError(
        "rollout.sampler_devices",
        f"{rollout.sampler_devices} of {devices} local devices would sample.",
        "With placement='split' leave at least one local device to each side, or use placement='shared'.",
      )


def _sampler_groups(config: RunConfig) -> Iterator[ConfigError]:
  joined = config.rollout.hosts_per_sampler > 1 and _hosts() > 1
  if joined and config.evaluation.every and config.evaluation.sampler == "own":
    problem = "a sampler of several hosts is the only one that they can have at a time: their programs have one order."
    yield ConfigError("evaluation.sampler", problem, "Set evaluation.sampler='shared'.")


def _hosts() -> int:
  import jax  # nothing else in this room needs it

  return jax.process_count()


def _local_devices() -> int:
  import jax  # nothing else in this room needs it

  return jax.local_device_count()


# Training


def _kept(config: RunConfig) -> Iterator[ConfigError]:
  if config.training.keep_best and not config.evaluation.every:
    problem = "no version is evaluated, so none is the best."
    yield ConfigError("training.keep_best", problem, "Set evaluation.every, or keep_best to 0.")


def _trackers(names: tuple[str, ...]) -> Iterator[ConfigError]:
  """Trackers that are asked for by name are there; TensorBoard, the default, may be missing."""
  for name in names:
    if name != "tensorboard" and importlib.util.find_spec(name) is None:
      remedy = f'Run: pip install -e ".[{name}]", or leave {name} out.'
      yield ConfigError("training.trackers", f"the package {name} is missing.", remedy)


def _durations(config: RunConfig) -> Iterator[ConfigError]:
  silence, timeout = config.training.watchdog_seconds, config.rollout.environment_timeout
  if silence <= timeout:
    yield ConfigError(
      "training.watchdog_seconds",
      f"after {silence} s the run would end, while an environment may still answer until {timeout} s.",
      "Raise training.watchdog_seconds above rollout.environment_timeout.",
    )


def _value_pretraining(config: RunConfig) -> Iterator[ConfigError]:
  settings, batch_size = config.value_pretraining, config.rollout.batch_size
  least, most = settings.min_steps, settings.max_steps
  if most < least:
    yield ConfigError(
      "value_pretraining.max_steps",
      f"at most {most} steps but at least {least}.",
      "Raise value_pretraining.max_steps to value_pretraining.min_steps or more.",
    )

  # Demonstrations come first, if there are any.
  course = settings.demonstration_steps
  if course > most:
    yield ConfigError(
      "value_pretraining.demonstration_steps",
      f"{course} of {most} steps.",
      "Raise value_pretraining.max_steps, which counts all steps.",
    )
  if course and not hasattr(config.environment, "demonstration"):
    yield ConfigError(
      "value_pretraining.demonstration_steps",
      f"{course}, and the environment makes no demonstrations.",
      "Set it to 0, or give the environment's settings a `demonstration` method.",
    )

  # A step on the store needs a whole batch.
  trained = settings.store_trajectories * (1.0 - settings.heldout_fraction)
  if settings.passes > 1 and trained < batch_size:
    yield ConfigError(
      "value_pretraining.store_trajectories",
      f"{settings.store_trajectories}, of which {int(trained)} are not held out, for batches of {batch_size}.",
      "Raise it to several times rollout.batch_size, or set value_pretraining.passes=1.",
    )


def _profile(steps: tuple[int, ...]) -> Iterator[ConfigError]:
  if steps and (len(steps) != 2 or steps[0] > steps[1]):
    problem = f"{','.join(map(str, steps))} is not the first and the last step of a trace."
    yield ConfigError("training.profile_steps", problem, "Give both, as in --profile_steps=10,12.")
