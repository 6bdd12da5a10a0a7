"""What each field of a configuration may be on its own: tables of names and ranges."""

from __future__ import annotations

from sao_jax.config import RunConfig
from sao_jax.configuration import config_tree
from sao_jax.errors import ConfigError

_DTYPES = ("float32", "bfloat16")

# Fields that name one of a few ways.
CHOICES: dict[str, tuple[str, ...]] = {
  "model.dtype": _DTYPES,
  "model.param_dtype": _DTYPES,
  "model.remat": ("none", "full", "dots"),
  "model.router": ("softmax", "sigmoid"),
  "model.moe_implementation": ("auto", "blocked", "megablox", "ragged_dot"),
  "algorithm.advantage": ("sao", "grpo"),
  "algorithm.advantage_values": ("post", "pre"),
  "algorithm.truncation": ("zero", "bootstrap", "mask"),
  "algorithm.value_head": ("scalar", "hl_gauss"),
  "algorithm.value_head_initializer": ("zeros", "normal"),
  "sampler.kv_after_publish": ("keep", "reprefill"),
  "sampler.cache_dtype": _DTYPES,
  "rollout.staleness": ("drop", "mask"),
  "rollout.placement": ("shared", "split"),
}

_OPTIMIZERS = ("policy_optimizer", "critic_optimizer", "sft.optimizer", "value_pretraining.optimizer")

# The smallest allowed value of whole numbers, by section.
_POSITIVE = {
  "model": "vocab_size num_layers d_model num_heads num_kv_heads head_dim d_ff num_experts_per_token d_ff_expert "
  "num_expert_groups num_groups_per_token max_positions",
  "model.yarn": "original_positions",
  "algorithm": "logprob_chunk",
  "rollout": "batch_size group_size max_turns max_tokens max_tokens_per_turn max_consecutive_failures",
  "sft": "batch_size",
  "value_pretraining": "plateau_window",
  "evaluation": "prompts",
  "training": "checkpoint_every keep_checkpoints log_every",
}
_NOT_NEGATIVE = {
  "model": "num_experts d_ff_shared num_dense_layers kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim "
  "v_head_dim index_topk index_num_heads index_head_dim",
  "model.lora": "rank",
  "algorithm": "critic_warmup_steps",
  "rollout": "admission_staleness environment_retries max_in_flight",
  "sft": "steps",
  "value_pretraining": "min_steps max_steps",
  "evaluation": "every seed",
  "training": "steps seed",
  **dict.fromkeys(_OPTIMIZERS, "warmup_steps"),
}
MINIMA: dict[str, int] = {
  **{f"{section}.{name}": 1 for section, names in _POSITIVE.items() for name in names.split()},
  **{f"{section}.{name}": 0 for section, names in _NOT_NEGATIVE.items() for name in names.split()},
  "rollout.max_staleness": -1,  # no bound
}

# Intervals of real numbers, in the usual notation.
INTERVALS: dict[str, str] = {
  "model.rope_theta": "(0, inf)",
  "model.rotary_fraction": "(0, 1]",
  "model.routed_scaling": "(0, inf)",
  "model.yarn.factor": "[1, inf)",
  "model.yarn.beta_fast": "(0, inf)",
  "model.yarn.beta_slow": "(0, inf)",
  "model.yarn.attention_factor": "[0, inf)",
  "model.lora.alpha": "(0, inf)",
  "model.rms_norm_eps": "(0, inf)",
  "algorithm.router_bias_update": "[0, inf)",
  "model.initializer_range": "(0, inf)",
  "sampler.temperature": "[0, inf)",
  "rollout.environment_timeout": "(0, inf)",
  "value_pretraining.plateau_gain": "[0, inf)",
  "evaluation.temperature": "[0, inf)",
  "evaluation.confidence": "(0, 1)",
  "training.audit_tolerance": "(0, inf)",
  "training.watchdog_seconds": "(0, inf)",
  **{f"{name}.learning_rate": "[0, inf)" for name in _OPTIMIZERS},
  **{f"{name}.b1": "[0, 1)" for name in _OPTIMIZERS},
  **{f"{name}.b2": "[0, 1)" for name in _OPTIMIZERS},
  **{f"{name}.eps": "(0, inf)" for name in _OPTIMIZERS},
  **{f"{name}.weight_decay": "[0, inf)" for name in _OPTIMIZERS},
  **{f"{name}.clip_norm": "(0, inf)" for name in _OPTIMIZERS},
}

# Tuples of positive whole numbers.
SIZES = ("rollout.row_lengths", "rollout.row_counts")


def check_bounds(config: RunConfig) -> None:
  """Raises ConfigError for the first field outside its table."""
  for field, choices in CHOICES.items():
    value = config_tree.get(config, field)
    if value not in choices:
      raise ConfigError(field, f"there is no {value!r}.", config_tree.nearest(value, choices))
  for field, minimum in MINIMA.items():
    value = config_tree.get(config, field)
    if value < minimum:
      raise ConfigError(field, f"{value} is too small.", f"Use a whole number of at least {minimum}.")
  for field, interval in INTERVALS.items():
    value = config_tree.get(config, field)
    if not _inside(value, interval):
      raise ConfigError(field, f"{value} is outside {interval}.", f"Choose a number in {interval}.")
  for field in SIZES:
    sizes = config_tree.get(config, field)
    if not sizes or any(size < 1 for size in sizes):
      raise ConfigError(field, f"{sizes} is not a list of sizes.", "Give positive whole numbers, as in (64, 128).")


def _inside(value: float, interval: str) -> bool:
  low, high = (float(bound) for bound in interval[1:-1].split(","))
  above = value >= low if interval[0] == "[" else value > low
  below = value <= high if interval[-1] == "]" else value < high
  return above and below
