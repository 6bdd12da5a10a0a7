"""Hints at settings that work but are probably not meant: fields without effect beside others, and costly pairs.

They are logged once where a run starts, and shown by `launch.config`; nothing is refused for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from sao_jax.config import AlgorithmConfig, OptimizerConfig, RunConfig, SamplerConfig
from sao_jax.configuration import config_tree


class Idle(NamedTuple):
  """Fields that have no effect where `holds`; they are mentioned when they are not at their defaults."""

  holds: Callable[[RunConfig], bool]
  because: str
  fields: tuple[str, ...]


def _of(section: str, *names: str) -> tuple[str, ...]:
  return tuple(f"{section}.{name}" for name in names)


USUAL_EPSILONS = {"ppo": "0.2 and 0.28", "cispo": "1 and 0.28", "gspo": "3e-4 and 4e-4"}  # low and high
PAGE_FIELDS = ("page_size", "num_pages", "prefill_chunk")

IDLE = (
  Idle(
    lambda config: not config.algorithm.needs_critic,
    "this algorithm.advantage knows neither a critic nor a discount",
    _of("critic.lora", "rank", "alpha", "targets")
    + _of("algorithm", "gamma", "alpha", "critic_lambda", "value_updates", "advantage_values", "value_clip")
    + _of("algorithm", "gae", "policy_lambda", "lambda_length")
    + _of("algorithm", "value_head", "value_head_initializer", "critic_reads_logprobs")
    + _of("algorithm", "freeze_attention", "freeze_router", "freeze_embeddings"),
  ),
  Idle(
    lambda config: not config.algorithm.needs_baselines,
    "only algorithm.advantage='running_mean' has a baseline",
    _of("algorithm", "baseline_scope", "baseline_window"),
  ),
  Idle(
    lambda config: config.algorithm.policy_loss == "reinforce",
    "algorithm.policy_loss='reinforce' knows no ratio",
    _of("algorithm", "epsilon_low", "epsilon_high"),
  ),
  Idle(
    lambda config: config.algorithm.policy_loss_reduction != "constant",
    "only algorithm.policy_loss_reduction='constant' divides by a length",
    _of("algorithm", "loss_length"),
  ),
  Idle(
    lambda config: config.algorithm.policy_lambda != "length_adaptive",
    "algorithm.policy_lambda is the same for all lengths",
    _of("algorithm", "alpha", "lambda_length"),
  ),
  Idle(
    lambda config: config.algorithm.value_updates == 1,
    "algorithm.value_updates=1 never moves a value away from that before the updates",
    _of("algorithm", "value_clip"),
  ),
  Idle(
    lambda config: config.algorithm.value_head == "scalar",
    "algorithm.value_head='scalar' has neither bins nor a range",
    _of("algorithm", "value_bins", "value_min", "value_max"),
  ),
  Idle(
    lambda config: not config.model.num_moe_layers,
    "no layer of the model has experts",
    _of("model", "num_experts_per_token", "d_ff_expert", "d_ff_shared", "renormalize_router", "router")
    + _of("model", "moe_implementation")
    + _of("algorithm", "freeze_router"),
  ),
  Idle(
    lambda config: config.model.yarn.factor == 1.0,
    "model.yarn.factor=1 stretches nothing",
    _of("model.yarn", "original_positions", "beta_fast", "beta_slow", "ramp", "truncate", "mscale_all_dim"),
  ),
  Idle(
    lambda config: config.model.yarn.ramp == "turns",
    "model.yarn.ramp='turns' has no bounds in dimensions",
    _of("model.yarn", "truncate"),
  ),
  Idle(
    lambda config: not config.model.is_latent,
    "model.kv_lora_rank=0 has no latent attention",
    _of("model.yarn", "mscale_all_dim"),
  ),
  Idle(
    lambda config: not config.model.lora.rank, "model.lora.rank=0 trains in full", _of("model.lora", "alpha", "targets")
  ),
  Idle(
    lambda config: not config.critic.lora.rank,
    "critic.lora.rank=0 trains in full",
    _of("critic.lora", "alpha", "targets"),
  ),
  Idle(
    lambda config: bool(config.critic.lora.rank),
    "critic.lora.rank above 0 trains neither routers nor embeddings",
    _of("algorithm", "freeze_router", "freeze_embeddings"),
  ),
  Idle(
    lambda config: not config.model.index_topk,
    "model.index_topk=0 has no indexer",
    _of("model", "index_num_heads", "index_head_dim"),
  ),
  Idle(
    lambda config: config.rollout.max_staleness == -1,
    "rollout.max_staleness=-1 allows any age",
    _of("rollout", "staleness"),
  ),
  Idle(
    lambda config: config.rollout.placement == "shared",
    "rollout.placement='shared' has no devices of the sampler's own",
    _of("rollout", "sampler_devices", "sampler_hosts"),
  ),
  Idle(
    lambda config: config.sampler.cache_layout == "slots",
    "sampler.cache_layout='slots' has no pages",
    _of("sampler", *PAGE_FIELDS),
  ),
  Idle(
    lambda config: config.sampler.cache_layout == "pages",
    "sampler.cache_layout='pages' decodes all slots together, reads the pages that they have, and prompts in chunks",
    _of("sampler", "decode_batch", "window_buckets", "prefill_buckets", "prefill_batch"),
  ),
  Idle(
    lambda config: not config.value_pretraining.heldout_fraction,
    "value_pretraining.heldout_fraction=0 leaves nothing to measure the critic by",
    _of("value_pretraining", "evaluate_every", "plateau_window", "patience", "plateau_gain"),
  ),
  Idle(lambda config: not config.training.audit, "training.audit is off", _of("training", "audit_tolerance")),
)


def hints(config: RunConfig) -> Iterator[str]:
  """Yields a sentence for each setting of a valid configuration that is probably not meant."""
  yield from _without_effect(config)
  yield from _algorithm(config)
  yield from _pages(config)
  yield from _rollouts(config)


def _without_effect(config: RunConfig) -> Iterator[str]:
  """Fields that were set, and that no one reads."""
  default = RunConfig(environment=None)
  for idle in IDLE:
    if idle.holds(config):
      changed = [path for path in idle.fields if config_tree.get(config, path) != config_tree.get(default, path)]
      if changed:
        yield f"{idle.because}, so {', '.join(changed)} will have no effect."


def _algorithm(config: RunConfig) -> Iterator[str]:
  model, algorithm, group_size = config.model, config.algorithm, config.rollout.group_size
  if model.num_moe_layers and model.num_experts_per_token == 1 and model.renormalize_router:
    yield (
      "model.num_experts_per_token=1 with model.renormalize_router=True: the weight of the only expert is 1 whatever "
      "its score, so the routers get no gradient but rounding. Set model.renormalize_router=False to train them."
    )
  if group_size > 1 and not algorithm.needs_groups:
    yield (
      f"rollout.group_size={group_size} with algorithm.advantage={algorithm.advantage!r}, which compares no rollouts "
      "with each other: a batch has fewer prompts for it. Set it to 1, or use algorithm.advantage=grpo."
    )

  # Trust regions are made for their losses.
  default = AlgorithmConfig()
  own = (default.epsilon_low, default.epsilon_high)
  if algorithm.policy_loss in USUAL_EPSILONS and (algorithm.epsilon_low, algorithm.epsilon_high) == own:
    yield (
      f"algorithm.policy_loss={algorithm.policy_loss!r} with the trust region of 'dis', epsilon_low={own[0]} and "
      f"epsilon_high={own[1]}. Usual for it: {USUAL_EPSILONS[algorithm.policy_loss]}."
    )

  # A rate of 0 is allowed, for comparisons.
  for section, name in (("policy_optimizer", "policy"), ("critic_optimizer", "critic")):
    optimizer: OptimizerConfig = getattr(config, section)
    if optimizer.learning_rate == 0 and (name == "policy" or algorithm.needs_critic):
      yield f"{section}.learning_rate=0: the {name} will never change."


def _pages(config: RunConfig) -> Iterator[str]:
  """Fields of pages where the platform takes none."""
  sampler, default = config.sampler, SamplerConfig()
  changed = [f"sampler.{name}" for name in PAGE_FIELDS if getattr(sampler, name) != getattr(default, name)]
  if sampler.cache_layout == "auto" and changed and not _on_tpu():
    yield (
      f"sampler.cache_layout='auto' takes pages on a TPU, and slots here, so {', '.join(changed)} will have no effect."
    )


def _on_tpu() -> bool:
  import jax  # only where the platform decides

  return jax.local_devices()[0].platform == "tpu"


def _rollouts(config: RunConfig) -> Iterator[str]:
  rollout, slots = config.rollout, config.sampler.num_slots
  if rollout.staleness == "drop" and 0 <= rollout.max_staleness < rollout.admission_staleness:
    yield (
      f"rollout.max_staleness={rollout.max_staleness} is below rollout.admission_staleness="
      f"{rollout.admission_staleness}: long rollouts will be generated and then dropped, which biases training "
      "to short answers. Raise it, or use rollout.staleness='mask'."
    )
  if 0 < rollout.max_in_flight < slots:
    yield (
      f"rollout.max_in_flight={rollout.max_in_flight} leaves {slots - rollout.max_in_flight} of {slots} slots of the "
      "sampler empty. Raise it, or lower sampler.num_slots."
    )
