"""The table of all fields of the configuration: another value than the default, and where it must be seen.

A new field needs a line in `FIELDS`; tests/training/test_wiring.py looks.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from sao_jax.config import CriticConfig
from sao_jax.configuration import config_tree
from sao_jax.training import phases
from toys import training_toy

SFT, PRETRAIN, TRAIN, EVALUATE, SAMPLE = PHASES = ("sft", "pretrain_value", "train", "evaluate", "sample")
RL = PRETRAIN, TRAIN
LEARN = SFT, *RL
EPISODES = *RL, EVALUATE, SAMPLE


class Use(NamedTuple):
  """A place where a field is seen.

  Attributes:
    phases: those that have it.
    where: "name.argument" of what is made, see `Calls.of`; or a function of all calls that returns what is seen.
    expected: what is seen there, from the configuration and the phase; None: the field's value.
    shows: what of the argument is compared.
  """

  phases: tuple[str, ...]
  where: str | Callable[[Any], list[Any]]
  expected: Callable[[Any, str], Any] | None = None
  shows: Callable[[Any], Any] = lambda seen: seen


class Field(NamedTuple):
  """A field in the run of the table: its value there, the places where it is seen, or the file of tests that see it."""

  value: Any
  uses: tuple[Use, ...] = ()
  seen_by: str = ""


def at(phases: tuple[str, ...] | str, *where: Any, expected=None, shows=lambda seen: seen) -> tuple[Use, ...]:
  phases = (phases,) if isinstance(phases, str) else phases
  return tuple(Use(phases, each, expected, shows) for each in where)


def all_of(where: str) -> Callable[[Any], list[Any]]:
  """Everything that any call was given a part of, ascending."""
  return lambda calls: [tuple(sorted({each for given in calls.of(where) for each in given}))]


def is_given(seen: Any) -> bool:
  return seen is not None


def whole(name: str) -> tuple[Use, ...]:
  """A field of the algorithm that the train step reads: tests/algorithm compares it with plain loops."""
  return at(RL, f"make_train_step.config.{name}")


def engine(name: str) -> tuple[Use, ...]:
  """A field that the engine reads."""
  return at(EPISODES, f"Engine.sampler_config.{name}")


def optimizer(section: str, phases: tuple[str, ...] | str, index: int, rate: float) -> dict[str, Field]:
  """The fields of an optimiser: the policy's is the first that is made, the critic's the second."""
  seen = lambda argument, **options: at(phases, f"adamw[{index}].{argument}", **options)
  get = lambda config, name: config_tree.get(config, f"{section}.{name}")
  after_first = lambda config, phase: pytest.approx(get(config, "learning_rate") / get(config, "warmup_steps"))
  fields = {
    "learning_rate": Field(
      rate,
      seen(
        "learning_rate",
        expected=lambda config, phase: pytest.approx(get(config, "learning_rate")),
        shows=lambda schedule: float(schedule(10**6)),
      ),
    ),
    "b1": Field(0.5 + rate, seen("b1")),
    "b2": Field(0.6 + rate, seen("b2")),
    "eps": Field(1e-3 * rate, seen("eps")),
    "weight_decay": Field(0.2 + rate, seen("weight_decay")),
    "clip_norm": Field(2.0 + rate, at(phases, f"clip_by_global_norm[{index}].max_norm")),
    "warmup_steps": Field(7, seen("learning_rate", expected=after_first, shows=lambda schedule: float(schedule(0)))),
  }
  return {f"{section}.{name}": field for name, field in fields.items()}


MODEL = (
  *at(LEARN, "param_specs.config", "make_policy_apply.config"),
  *at(RL, "critic_specs.config", "make_critic_apply.config", "critic_params_from_policy.config"),
  *at(EPISODES, "Engine.model_config"),
)

# A run with other values than the defaults in every field. A section stands for its fields where it is handed on as a
# whole, and something else shows that each of them is read.
FIELDS = {
  "name": Field("wired", seen_by="tests/report/test_page.py"),
  "model": Field(dataclasses.replace(training_toy.get_config().model, router="sigmoid", checkpoint="elsewhere"), MODEL),
  "model.checkpoint": Field(
    "elsewhere",
    at(PHASES, lambda calls: calls.of("load_params.directory") or [""], shows=lambda folder: pathlib.Path(folder).name),
  ),
  "mesh": Field(dataclasses.replace(training_toy.get_config().mesh, fsdp=2, data=2), at(PHASES, "make_mesh[0].config")),
  "mesh.allow_split_physical_axes": Field(True, seen_by="tests/parallel/test_torus.py"),
  # The algorithm.
  "algorithm.advantage": Field("sao", seen_by="tests/training/test_methods.py"),
  "algorithm.epsilon_low": Field(0.4, at(TRAIN, "trust_region.epsilon_low")),
  "algorithm.epsilon_high": Field(4.5, at(TRAIN, "trust_region.epsilon_high")),
  "rollout.filter_equal_groups": Field(False, seen_by="tests/rollout/test_equal_groups.py"),
  "algorithm.baseline_scope": Field("prompt", seen_by="tests/training/test_methods.py"),
  "algorithm.baseline_window": Field(8, seen_by="tests/training/test_methods.py"),
  "algorithm.policy_loss": Field("dis", seen_by="tests/algorithm/test_loss_variants.py"),
  "algorithm.policy_loss_reduction": Field("constant", whole("policy_loss_reduction")),
  "algorithm.loss_length": Field(77, whole("loss_length")),
  "algorithm.policy_lambda": Field("length_adaptive", seen_by="tests/algorithm/test_td_steps.py"),
  "algorithm.lambda_length": Field("response", whole("lambda_length")),
  "algorithm.gae": Field("step_average", whole("gae")),
  "algorithm.gamma": Field(0.75, at(TRAIN, "packed_returns.gamma")),
  "algorithm.alpha": Field(1.25, at(TRAIN, "one_minus_lambda.alpha")),
  "algorithm.critic_lambda": Field(0.7, whole("critic_lambda")),
  "algorithm.value_updates": Field(3, whole("value_updates") + at(LEARN, "make_optimizer[1].updates_per_step")),
  "algorithm.advantage_values": Field("pre", whole("advantage_values")),
  "algorithm.truncation": Field(
    "mask",
    whole("truncation")
    + at(RL, "TrajectoryBuffer.train_truncated", expected=lambda config, phase: config.algorithm.truncation != "mask"),
  ),
  "algorithm.whiten_advantages": Field(False, whole("whiten_advantages")),
  "algorithm.value_clip": Field(0.3, at(TRAIN, "ScalarHead.clip")),
  "algorithm.value_head": Field(
    "hl_gauss", at(RL, lambda calls: ["hl_gauss" if calls.made["HLGaussHead"] else "scalar"])
  ),
  "algorithm.value_head_initializer": Field(
    "normal", at(RL, "critic_specs[0].initializer", "critic_params_from_policy.initializer")
  ),
  "algorithm.critic_reads_logprobs": Field(
    True, at(RL, "critic_specs[0].reads_logprobs", "critic_params_from_policy.reads_logprobs")
  ),
  "algorithm.value_bins": Field(31, at(RL, "HLGaussHead.num_outputs") + at(PRETRAIN, "critic_specs[0].num_outputs")),
  "algorithm.value_min": Field(-1.0, at(RL, "HLGaussHead.low")),
  "algorithm.value_max": Field(2.0, at(RL, "HLGaussHead.high")),
  "algorithm.critic_warmup_steps": Field(6, at(TRAIN, "Phase.critic_steps")),
  "algorithm.router_replay": Field(
    True,
    at(RL, "Engine.keep_experts")
    + at(
      RL,
      *("TrajectoryBuffer.required_experts", "pack.routed_shape"),
      expected=lambda config, phase: config.algorithm.router_replay,
      shows=is_given,
    ),
  ),
  "algorithm.router_bias_update": Field(0.01, at(TRAIN, "update_router_bias.rate")),
  "algorithm.micro_batches": Field(
    2, at(TRAIN, "gradient_step.micro_batches") + at(SFT, "make_sft_step.micro_batches")
  ),
  "algorithm.logprob_chunk": Field(64, at(LEARN, "make_policy_apply.chunk")),
  # In value pretraining all of the critic trains.
  **{
    f"algorithm.freeze_{part}": Field(
      value,
      at(TRAIN, f"frozen_critic_paths.{part}")
      + at(PRETRAIN, f"frozen_critic_paths.{part}", expected=lambda *unused: False),
    )
    for part, value in (("attention", False), ("router", True), ("embeddings", True))
  },
  "critic": Field(CriticConfig(), seen_by="tests/training/test_lora.py"),
  **optimizer("policy_optimizer", RL, 0, 0.01),
  **optimizer("critic_optimizer", TRAIN, 1, 0.02),
  **optimizer("sft.optimizer", SFT, 0, 0.03),
  **optimizer("value_pretraining.optimizer", PRETRAIN, 1, 0.04),
  # The sampler.
  "sampler.num_slots": Field(24, engine("num_slots")),
  "sampler.context_length": Field(
    48,
    engine("context_length")
    + at(RL, "RolloutLoop.context_length")
    + at(EPISODES, "EpisodeRunner.limits.context_length"),
  ),
  "sampler.decode_steps": Field(5, engine("decode_steps")),
  "sampler.decode_batch": Field(4, engine("decode_batch")),
  "sampler.prefill_buckets": Field((16,), engine("prefill_buckets")),
  "sampler.prefill_batch": Field(3, engine("prefill_batch")),
  "sampler.prefill_chunk": Field(40, engine("prefill_chunk")),
  "sampler.window_buckets": Field((24,), engine("window_buckets")),
  "sampler.temperature": Field(
    0.9,
    at(LEARN, "make_policy_apply.temperature")
    + at(RL, "RolloutLoop.temperature", "EpisodeRunner.temperature", "run_episodes.temperature"),
  ),
  "sampler.top_p": Field(0.8, at(EPISODES, "SamplingRule.top_p")),
  "sampler.top_k": Field(9, at(EPISODES, "SamplingRule.top_k")),
  "sampler.kv_after_publish": Field("reprefill", engine("kv_after_publish")),
  "sampler.cache_dtype": Field("bfloat16", engine("cache_dtype")),
  "sampler.cache_layout": Field("pages", engine("cache_layout")),
  "sampler.page_size": Field(16, engine("page_size")),
  "sampler.num_pages": Field(96, engine("num_pages")),
  "sampler.mesh": Field(None, seen_by="tests/learner/test_placement.py"),
  # Rollouts.
  "rollout.batch_size": Field(6, at(RL, "Ledger.batch_size", "Rollouts.batch_size")),
  "rollout.group_size": Field(2, at(RL, "Ledger.group_size") + at(RL, "pack.grouped", expected=lambda *unused: True)),
  "rollout.admission_staleness": Field(3, at(RL, "Ledger.staleness")),
  "rollout.max_staleness": Field(11, at(RL, "TrajectoryBuffer.max_staleness", "make_train_step.max_lag")),
  "rollout.staleness": Field("mask", at(RL, "TrajectoryBuffer.staleness")),
  "rollout.max_turns": Field(
    3,
    at(EPISODES, "EpisodeRunner.limits.max_turns")
    + at(RL, "warm_up.prefixes", expected=lambda config, phase: config.rollout.max_turns > 1),
  ),
  "rollout.max_tokens": Field(17, at(EPISODES, "EpisodeRunner.limits.max_tokens")),
  "rollout.max_trajectory_tokens": Field(
    99,
    at(
      EPISODES,
      "EpisodeRunner.limits.trajectory_length",
      expected=lambda config, phase: config.rollout.max_trajectory_tokens or sys.maxsize,
    ),
  ),
  "rollout.max_tokens_per_turn": Field(7, at(EPISODES, "EpisodeRunner.limits.max_tokens_per_turn")),
  "rollout.environment_timeout": Field(
    25.0, at(EPISODES, "EpisodeRunner.timeout") + at(RL, "call_environment.seconds")
  ),
  "rollout.environment_retries": Field(4, at(EPISODES, "EpisodeRunner.retries")),
  "rollout.outage_seconds": Field(200.0, at(EPISODES, "EpisodeRunner.outages.seconds")),
  "rollout.difficulty_floor": Field(0.25, at(TRAIN, "DifficultyFilter.floor")),
  "rollout.difficulty_decay": Field(0.5, at(TRAIN, "DifficultyFilter.decay")),
  "rollout.difficulty_passes": Field(0.75, at(TRAIN, "DifficultyFilter.passes")),
  "rollout.row_lengths": Field(
    (40, 56),
    at(SFT, "pack[-1].row_lengths")
    + at(RL, all_of("pack.row_lengths"))
    + at(RL, "TrajectoryBuffer.longest_context", expected=lambda config, phase: max(config.rollout.row_lengths)),
  ),
  "rollout.row_counts": Field((16, 32), at(SFT, "pack[-1].row_counts") + at(RL, all_of("pack.row_counts"))),
  "rollout.max_in_flight": Field(
    10,
    at(
      RL,
      "RolloutLoop.max_in_flight",
      expected=lambda config, phase: config.rollout.max_in_flight or config.sampler.num_slots,
    ),
  ),
  "rollout.deterministic": Field(True, at(RL, "Ledger.in_rounds", "Rollouts.deterministic")),
  "rollout.record": Field(True, at(RL, "Rollouts.record", expected=lambda *unused: True, shows=is_given)),
  "rollout.placement": Field(
    "split",
    at(
      PHASES,
      "make_mesh[0].devices",
      expected=lambda config, phase: 8 if config.rollout.placement == "shared" else 8 - config.rollout.sampler_devices,
      shows=len,
    ),
  ),
  "rollout.sampler_devices": Field(
    4,
    at(
      EPISODES, "make_mesh[-1].devices", expected=lambda config, phase: config.rollout.sampler_devices or 8, shows=len
    ),
  ),
  "rollout.sampler_hosts": Field(1, seen_by="tests/learner/test_placement.py"),
  "rollout.hosts_per_sampler": Field(1, seen_by="tests/learner/test_placement.py"),
  # Imitation, value pretraining, evaluation.
  "sft.steps": Field(5, at(SFT, "RunLog.total")),
  "sft.batch_size": Field(9, at(SFT, "pack.trajectories", shows=len)),
  "value_pretraining.demonstration_steps": Field(1, seen_by="tests/training/test_experience.py"),
  "value_pretraining.passes": Field(2, seen_by="tests/training/test_experience.py"),
  "value_pretraining.store_trajectories": Field(64, seen_by="tests/training/test_experience.py"),
  "value_pretraining.heldout_fraction": Field(0.3, seen_by="tests/training/test_experience.py"),
  "value_pretraining.evaluate_every": Field(3, seen_by="tests/training/test_experience.py"),
  "value_pretraining.min_steps": Field(3, seen_by="tests/training/test_plateau.py"),
  "value_pretraining.max_steps": Field(8, at(PRETRAIN, "Phase.critic_steps", "RunLog.total")),
  "value_pretraining.plateau_window": Field(4, seen_by="tests/training/test_plateau.py"),
  "value_pretraining.patience": Field(3, seen_by="tests/training/test_plateau.py"),
  "value_pretraining.plateau_gain": Field(0.02, seen_by="tests/training/test_plateau.py"),
  "evaluation.every": Field(2, at(TRAIN, "PinnedEvaluation.config.evaluation.every")),
  "evaluation.prompts": Field(14, at(EVALUATE, "run_episodes.prompts", shows=len)),
  "evaluation.temperature": Field(0.5, at(EVALUATE, "run_episodes.temperature", "EpisodeRunner.temperature")),
  "evaluation.seed": Field(77, at((*RL, EVALUATE, SAMPLE), "heldout_prompts.seed") + at(EVALUATE, "Engine.seed")),
  "evaluation.confidence": Field(0.9, at(EVALUATE, "success.confidence")),
  "evaluation.sampler": Field("shared", seen_by="tests/evaluation/test_heldout.py"),
  "evaluation.success_threshold": Field(0.5, seen_by="tests/evaluation/test_heldout.py"),
  # Training.
  "training.steps": Field(
    15,
    at(TRAIN, "Phase.policy_steps", "PinnedEvaluation.last_version")
    + at(TRAIN, "RunLog.total", expected=lambda config, phase: phases.reinforcement_learning(config).steps),
  ),
  "training.seed": Field(
    321,
    at(LEARN, "train_prompts.seed")
    + at(SAMPLE, "Engine.seed")
    + at(RL, "Engine.seed", expected=lambda config, phase: phases.sampler_seed(config, NAMES[phase]))
    + at(LEARN, "make_prompt_iterator.seed", expected=lambda config, phase: phases.prompt_seed(config, NAMES[phase])),
  ),
  "training.checkpoint_every": Field(19, at(LEARN, "Checkpointer[0].every") + at(RL, "EpisodeSamples.every")),
  "training.keep_checkpoints": Field(5, at(LEARN, "Checkpointer[0].keep")),
  "training.keep_best": Field(3, at(RL, "Checkpointer[0].best", shows=lambda best: best.count)),
  "training.log_every": Field(3, at(LEARN, "RunLog.every")),
  "training.trackers": Field((), at(LEARN, "RunLog.trackers")),
  "training.tracker_project": Field("wired", at(LEARN, "RunLog.project")),
  "training.max_skipped_updates": Field(7, at(LEARN, "RunLog.max_skipped_updates")),
  "training.lock_seconds": Field(45.0, at(LEARN, "run_lock.patience")),
  "training.audit": Field(False, at(RL, lambda calls: [bool(calls.made["compare"])])),
  "training.audit_tolerance": Field(0.02, at(RL, "compare.tolerance")),
  "training.profile_steps": Field((2, 3), at(RL, "Profile.first_and_last")),
  "training.watchdog_seconds": Field(123.0, at(RL, "RolloutLoop.watchdog_seconds")),
}
NAMES = {SFT: phases.SFT, PRETRAIN: phases.VALUE_PRETRAINING, TRAIN: phases.TRAIN}

# Another run, of `train` alone, with what excludes the values of the first one.
SECOND = {
  "model.checkpoint": "",
  "algorithm.value_clip": 0.3,
  "algorithm.value_head": "scalar",
  "algorithm.router_replay": True,
  "mesh.expert": 2,
  "rollout.placement": "shared",
  "rollout.sampler_devices": 0,
  "rollout.deterministic": True,
  "rollout.max_in_flight": 0,
  "rollout.max_turns": 1,
  "training.audit": False,
}
FIRST = ("algorithm.value_clip", "algorithm.router_replay", "rollout.deterministic", "training.audit")  # its defaults


def first_config():
  values = {path: field.value for path, field in FIELDS.items() if path not in FIRST}
  sections = {path: values.pop(path) for path in list(values) if "." not in path}
  return config_tree.replace(dataclasses.replace(training_toy.get_config(), **sections), values)


RUNS = {"first": first_config(), "second": config_tree.replace(first_config(), SECOND)}
BUILT = [*(("first", phase) for phase in PHASES), ("second", TRAIN)]
