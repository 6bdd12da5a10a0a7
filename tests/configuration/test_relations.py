"""Every configuration that cannot work is refused before any work, naming the field and the remedy."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import typing

import pytest
from toys import training_toy

from sao_jax.algorithm.loss_variants import POLICY_LOSSES
from sao_jax.algorithm.train_step import ADVANTAGES
from sao_jax.config import AlgorithmConfig, ModelConfig, RunConfig, SamplerConfig, Sizes
from sao_jax.configuration import bounds, config_tree, relations
from sao_jax.configuration.relations import validate
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.errors import ConfigError
from sao_jax.evaluation.fixed_policy import check_prompts
from sao_jax.models.lora import TARGETS


@dataclasses.dataclass(frozen=True)
class Toy:
  name: str = "toy"
  vocab_size: int = 272

  def tokenizer(self):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = self.vocab_size
    return tokenizer

  def make(self, tokenizer):
    raise AssertionError("validation makes no environment")

  def prompts(self, tokenizer, split, seed):
    raise AssertionError("validation reads no prompts")


@dataclasses.dataclass(frozen=True)
class Demonstrated(Toy):
  def demonstration(self, prompt, tokenizer, rng):
    raise AssertionError("validation asks for no demonstration")


@dataclasses.dataclass
class Unfrozen:
  name: str = "toy"


@dataclasses.dataclass(frozen=True)
class Incomplete:
  name: str = "toy"


VALID = RunConfig(environment=Toy())

# The bounds of all fields, by their kind, as config.py has them.
ANNOTATIONS = {path: annotation for path, _, annotation in config_tree.leaves(VALID)}
CHOICES = {path: typing.get_args(a) for path, a in ANNOTATIONS.items() if typing.get_origin(a) is typing.Literal}
BOUNDED = {path: typing.get_args(a) for path, a in ANNOTATIONS.items() if typing.get_origin(a) is typing.Annotated}
MINIMA = {
  path: int(interval[1:].split(",")[0])
  for path, (kind, interval) in BOUNDED.items()
  if kind is int and interval.endswith("inf)")  # seeds have two ends: test_seeds.py
}
INTERVALS = {path: interval for path, (kind, interval) in BOUNDED.items() if kind is float}
SIZES = [path for path, annotation in ANNOTATIONS.items() if annotation == Sizes]


def refused(overrides: dict, *, training: bool = True) -> ConfigError:
  config = config_tree.replace(VALID, overrides)
  with pytest.raises(ConfigError) as error:
    validate(config, training=training)
  assert error.value.field in {*ANNOTATIONS, "environment"}
  return error.value


def test_the_defaults_are_valid():
  validate(VALID, training=True)
  validate(dataclasses.replace(VALID, model=ModelConfig(num_experts=8, d_ff_shared=64)), training=True)


# Group-relative advantages, as they work.
STRETCHED = {"model.max_positions": 64, "model.yarn.original_positions": 64, "model.yarn.factor": 4.0}
GRPO = {
  "algorithm.advantage": "grpo",
  "algorithm.critic_warmup_steps": 0,
  "rollout.group_size": 8,
}
# A sigmoid router with groups, as it works.
GROUPED = {"model.router": "sigmoid", "model.num_experts": 8, "model.num_expert_groups": 4}


@pytest.mark.parametrize(
  "overrides, field, problem, remedy",
  [
    ({"environment.vocab_size": 300}, "model.vocab_size", "272 rows", "tokenizer's size"),
    ({"training.keep_best": 1}, "training.keep_best", "no version is evaluated", "Set evaluation.every"),
    ({"model.num_heads": 3}, "model.num_heads", "3 heads", "multiple of model.num_kv_heads"),
    ({"model.head_dim": 15}, "model.head_dim", "15 is odd", "even model.head_dim"),
    ({"model.num_experts": 1}, "model.num_experts_per_token", "2 experts per token of 1", "raise model.num_experts"),
    ({"model.num_dense_layers": 3}, "model.num_dense_layers", "3 dense layers of 2", "at most model.num_layers"),
    ({"model.rotary_fraction": 0.2}, "model.rotary_fraction", "0.2 of 16 dimensions is an odd", "that is even"),
    ({"model.routed_scaling": 2.0}, "model.router", "no scaling", "model.router=sigmoid"),
    (GROUPED | {"model.num_expert_groups": 3}, "model.num_expert_groups", "8 experts do not split", "a multiple of"),
    (GROUPED | {"model.num_expert_groups": 8}, "model.num_groups_per_token", "groups of 1 experts", "enough groups"),
    (GROUPED | {"model.num_experts_per_token": 3}, "model.num_groups_per_token", "1 of 4 groups of 2", "enough groups"),
    (GROUPED | {"model.num_groups_per_token": 5}, "model.num_groups_per_token", "5 of 4 groups", "at most all of them"),
    ({"model.lora.targets": ("router",)}, "model.lora.targets", "there is no 'router'", "attention, mlp"),
    ({"model.lora.rank": 4, "model.lora.targets": ()}, "model.lora.targets", "nothing to adapt", "attention, mlp"),
    ({"critic.lora.rank": 4, "critic.lora.targets": ()}, "critic.lora.targets", "nothing to adapt", "attention, mlp"),
    (
      {"critic.lora.rank": 4, "critic.lora.targets": ("attention",)},
      "critic.lora.targets",
      "attention alone, which RL leaves as it is",
      "Add mlp, or set algorithm.freeze_attention=False",
    ),
    ({"model.lora.rank": 8, "critic.lora.rank": 4}, "critic.lora.rank", "4 of model.lora.rank=8", "to 8 or more"),
    (
      {"model.lora.rank": 4, "critic.lora.rank": 4, "critic.lora.targets": ("mlp",)},
      "critic.lora.targets",
      "no attention, which the policy adapts",
      "Add attention",
    ),
    ({"rollout.group_size": 3}, "rollout.batch_size", "128 trajectories do not divide into groups of 3", "a multiple"),
    (GRPO | {"rollout.group_size": 1}, "rollout.group_size", "there is 1 of each", "2 or more"),
    ({"rollout.filter_equal_groups": True}, "rollout.filter_equal_groups", "no rollouts within", "advantage=grpo"),
    (GRPO | {"algorithm.whiten_advantages": True}, "algorithm.whiten_advantages", "equal rewards", "at auto"),
    (
      GRPO | {"algorithm.critic_warmup_steps": 10},
      "algorithm.critic_warmup_steps",
      "10 critic-only steps",
      "--config.algorithm.critic_warmup_steps=0",
    ),
    (GRPO | {"algorithm.truncation": "bootstrap"}, "algorithm.truncation", "critic's value", "'zero' or 'mask'"),
    ({"algorithm.router_replay": True}, "algorithm.router_replay", "no layer with experts", "False"),
    (
      {"algorithm.router_replay": True, "model.num_experts": 2**15 + 1},
      "algorithm.router_replay",
      "32769 experts do not fit",
      "False",
    ),
    (
      {"algorithm.router_bias_update": 0.1, "model.num_experts": 8},
      "algorithm.router_bias_update",
      "no correction bias",
      "model.router=sigmoid",
    ),
    ({"model.max_positions": 64}, "sampler.context_length", "meant for 64", "model.yarn"),
    (STRETCHED | {"model.yarn.factor": 3.9}, "sampler.context_length", "meant for 249", "max_position_embeddings"),
    ({"sampler.temperature": 0.0}, "sampler.temperature", "temperature 0", "above 0"),
    ({"sampler.top_p": 0.8}, "sampler.top_p", "top_p=0.8", "sampler.top_p=1"),
    ({"sampler.top_k": 40}, "sampler.top_k", "top_k=40", "sampler.top_k=0"),
    ({"sampler.num_pages": 1}, "sampler.num_pages", "pages for 128 tokens", "Raise it, or set it to 0"),
    ({"rollout.row_lengths": (64, 128)}, "rollout.row_lengths", "longest row has 128", "Add sampler.context_length"),
    ({"rollout.max_trajectory_tokens": 255}, "rollout.max_trajectory_tokens", "one context may have 256", "0 for no"),
    (
      {"rollout.deterministic": True, "evaluation.sampler": "shared"},
      "rollout.deterministic",
      "what is sampled together",
      "evaluation.sampler",
    ),
    ({"algorithm.micro_batches": 3}, "rollout.row_counts", "32 rows do not divide into 3", "algorithm.micro_batches"),
    ({"mesh.data": 16, "mesh.fsdp": 4}, "rollout.row_counts", "on 64 batch shards", "mesh.data"),
    ({"rollout.row_counts": (32, 64)}, "rollout.row_counts", "hold 64 trajectories", "larger row count"),
    ({"rollout.placement": "split"}, "rollout.sampler_devices", "0 of 8 local devices", "placement='shared'"),
    (
      {"rollout.placement": "split", "rollout.sampler_devices": 8},
      "rollout.sampler_devices",
      "8 of 8 local devices",
      "at least one local device",
    ),
    ({"value_pretraining.max_steps": 10}, "value_pretraining.max_steps", "at least 50", "Raise value_pretraining"),
    (
      {"value_pretraining.demonstration_steps": 501},
      "value_pretraining.demonstration_steps",
      "501 of 500 steps",
      "Raise value_pretraining.max_steps",
    ),
    (
      {"value_pretraining.demonstration_steps": 5},
      "value_pretraining.demonstration_steps",
      "makes no demonstrations",
      "Set it to 0",
    ),
    (
      {"value_pretraining.store_trajectories": 140, "value_pretraining.heldout_fraction": 0.1},
      "value_pretraining.store_trajectories",
      "of which 126 are not held out, for batches of 128",
      "value_pretraining.passes=1",
    ),
    ({"training.profile_steps": (10,)}, "training.profile_steps", "10 is not the first and the last", "=10,12"),
    ({"training.profile_steps": (3, 2)}, "training.profile_steps", "3,2 is not the first and the last", "=10,12"),
    ({"rollout.environment_timeout": 600.0}, "training.watchdog_seconds", "until 600.0 s", "Raise training.watchdog"),
  ],
)
def test_fields_that_contradict_each_other(overrides, field, problem, remedy):
  error = refused(overrides)
  assert error.field == field and problem in error.problem and remedy in error.remedy
  assert field in str(error) and "remedy: " in str(error)


def test_a_sampler_of_several_hosts_evaluates_itself(monkeypatch):
  joined = {"rollout.hosts_per_sampler": 2, "rollout.placement": "split", "rollout.sampler_hosts": 2}
  own = config_tree.replace(training_toy.get_config(), joined | {"evaluation.sampler": "own", "evaluation.every": 1})
  monkeypatch.setattr(relations, "_hosts", lambda: 4)
  with pytest.raises(ConfigError) as error:
    validate(own, training=True)
  assert error.value.field == "evaluation.sampler"
  validate(own, training=False)  # launch.evaluate has no other one
  for overrides in ({"evaluation.sampler": "shared"}, {"evaluation.every": 0}):
    validate(config_tree.replace(own, overrides), training=True)


@pytest.mark.parametrize(
  "overrides",
  [
    {"sampler.temperature": 0.0},
    {"sampler.top_p": 0.8},
    {"sampler.top_k": 40},
  ],
)
def test_evaluation_may_filter_and_be_greedy(overrides):
  validate(config_tree.replace(VALID, overrides), training=False)


@pytest.mark.parametrize(
  "overrides",
  [
    {"sampler.temperature": 0.7},  # both sides use it
    {"rollout.admission_staleness": 0, "rollout.max_staleness": 0},
    {"rollout.max_staleness": -1},
    {"rollout.placement": "split", "rollout.sampler_devices": 2},
    {"algorithm.epsilon_low": 1.0},
    {"sampler.prefill_buckets": (16,)},  # longer prompts are written in pieces
    {"model.vocab_size": 512},
    STRETCHED,  # 64 positions, times four
    GRPO,
    GRPO | {"algorithm.truncation": "mask"},
    GRPO | {"algorithm.whiten_advantages": False},
    {"rollout.group_size": 2},  # with a critic: groups are a choice of prompts only
  ],
)
def test_unusual_but_sound(overrides):
  validate(config_tree.replace(VALID, overrides), training=True)


@pytest.mark.parametrize("field", sorted(CHOICES))
def test_a_misspelt_name_gets_the_nearest(field):
  choices = CHOICES[field]
  error = refused({field: choices[-1] + "x"})
  assert error.field == field
  assert f"Did you mean {choices[-1]!r}?" in error.remedy and all(repr(choice) in error.remedy for choice in choices)
  for choice in choices:
    # Which need sampler_devices, groups, or algorithm.gae=segments.
    if choice not in ("split", "grpo", "dr_grpo", "running_mean", "segment"):
      validate(config_tree.replace(VALID, {field: choice}), training=True)


def test_names_are_those_that_the_rooms_know():
  assert CHOICES["algorithm.advantage"] == tuple(ADVANTAGES)
  assert CHOICES["algorithm.policy_loss"] == tuple(POLICY_LOSSES)
  assert typing.get_args(typing.get_args(ANNOTATIONS["model.lora.targets"])[0]) == tuple(TARGETS)


@pytest.mark.parametrize("field", sorted(MINIMA))
def test_whole_numbers_below_their_minimum(field):
  minimum = MINIMA[field]
  error = refused({field: minimum - 1})
  assert error.field == field and str(minimum - 1) in error.problem and f"at least {minimum}" in error.remedy


@pytest.mark.parametrize("field", sorted(INTERVALS))
def test_numbers_outside_their_interval(field):
  interval = INTERVALS[field]
  low, high = (float(bound) for bound in interval[1:-1].split(","))
  outside = [low - 0.1, math.nan, -math.inf, *([low] if interval[0] == "(" else [])]
  outside += [high + 0.1, math.inf] if high < math.inf else []
  outside += [high] if interval[-1] == ")" else []
  for value in outside:
    error = refused({field: value})
    assert error.field == field and interval in error.problem and interval in error.remedy


def test_infinity_turns_off_what_may_be_turned_off():
  """Everywhere else it is refused."""
  allowed = {path for path, interval in INTERVALS.items() if interval.endswith("inf]")}
  assert allowed == {"algorithm.epsilon_high", "algorithm.value_clip"}
  validate(config_tree.replace(VALID, dict.fromkeys(allowed, math.inf)), training=True)


@pytest.mark.parametrize("field", SIZES)
def test_sizes(field):
  for wrong in [(0, 256), (-1,), ()]:
    error = refused({field: wrong})
    assert error.field == field and "as in (64, 128)" in error.remedy


# Values that their fields exclude, written out.
EXCLUDED = {
  "model.indexer_types": ("full", "sharde"),
  "algorithm.whiten_advantages": "automatic",
  "model.lora.targets": ("attention", "router"),
  "critic.lora.targets": ("attention", "router"),
  "algorithm.epsilon_low": 1.3,
  "algorithm.epsilon_high": 0.0,
  "algorithm.gamma": 1.1,
  "algorithm.alpha": 0.5,
  "algorithm.critic_lambda": -0.1,
  "algorithm.value_updates": 0,
  "algorithm.value_clip": -1.0,
  "algorithm.micro_batches": 0,
  "sampler.num_slots": 0,
  "sampler.context_length": 0,
  "sampler.decode_steps": 0,
  "sampler.decode_batch": 0,
  "sampler.prefill_batch": 0,
  "sampler.prefill_buckets": (),
  "sampler.window_buckets": (0,),
  "training.profile_steps": (0, 1),
  "sampler.top_p": 0.0,
  "sampler.top_k": -1,
  "policy_optimizer.clip_norm": -1.0,  # 0: no clipping
  "rollout.max_staleness": -2,
  "rollout.sampler_devices": -1,
}


@pytest.mark.parametrize("field", sorted(EXCLUDED))
def test_values_that_a_field_excludes(field):
  error = refused({field: EXCLUDED[field]})
  assert error.field == field and error.problem and error.remedy


@pytest.mark.parametrize(
  "change",
  [
    {"num_slots": 0},
    {"context_length": 0},
    {"decode_steps": 0},
    {"decode_batch": 0},
    {"prefill_batch": 0},
    {"prefill_buckets": ()},
    {"prefill_buckets": (0, 8)},
    {"window_buckets": (-1,)},
    {"kv_after_publish": "drop"},
    {"top_p": 0.0},
    {"top_k": -1},
  ],
  ids=str,
)
def test_sampler_sizes_that_cannot_work_are_refused(change):
  with pytest.raises(ConfigError) as error:
    bounds.check_bounds(dataclasses.replace(SamplerConfig(), **change), "sampler.")
  assert error.value.field in {f"sampler.{name}" for name in change}
  bounds.check_bounds(SamplerConfig(), "sampler.")


@dataclasses.dataclass(frozen=True)
class Bounded:
  """Annotations that an environment of one's own may have."""

  limit: typing.Annotated[float, "(0, 1]"] | None = None
  mode: typing.Literal["slow", "fast"] = "slow"
  pair: tuple[typing.Annotated[float, "[0, inf)"], ...] = ()


@pytest.mark.parametrize(
  "field, inside, outside, problem",
  [
    ("limit", [None, 1, 0.5], [0.0, 2, math.nan], r"outside \(0, 1\]"),
    ("mode", ["fast"], ["fats"], "there is no 'fats'"),
    ("pair", [(), (0.0, 3)], [(1.0, -1.0)], r"-1.0 is outside \[0, inf\)"),
  ],
)
def test_bounds_of_other_dataclasses(field, inside, outside, problem):
  for value in inside:
    bounds.check_bounds(config_tree.replace(Bounded(), {field: value}))
  for value in outside:
    with pytest.raises(ConfigError, match=problem):
      bounds.check_bounds(config_tree.replace(Bounded(), {field: value}))


@pytest.mark.parametrize(
  "overrides, field",
  [
    ({"algorithm.value_head": "hl_gauss", "algorithm.value_bins": 1}, "algorithm.value_bins"),
    ({"algorithm.value_head": "hl_gauss", "algorithm.value_min": 1.0}, "algorithm.value_max"),
  ],
)
def test_the_classification_head(overrides, field):
  assert refused(overrides).field == field


def test_every_field_is_checked_or_free_on_purpose():
  """A new field must be given its bounds, or be listed here."""
  free = {"name", "environment.name", "environment.vocab_size", "model.checkpoint"}
  free |= {"algorithm.value_bins", "algorithm.value_min", "algorithm.value_max"}  # of one head alone: a relation
  free |= {f"mesh.{axis}" for axis in ("data", "fsdp", "expert", "tensor", "context")}  # make_mesh, with the devices
  free |= {"sampler.mesh"}  # the same
  free |= {"training.tracker_project"}
  fields = {path for path, value, _ in config_tree.leaves(VALID) if not isinstance(value, bool)}
  free |= {"evaluation.success_threshold", "rollout.difficulty_passes"}  # returns may be anything
  free |= {"algorithm.whiten_advantages"}  # one name beside true and false
  free |= {"algorithm.policy_lambda"}  # one name beside numbers: test_algorithm.py
  of_tuples = {
    "model.lora.targets",
    "critic.lora.targets",
    "model.indexer_types",
    "sampler.window_buckets",
    "training.profile_steps",
    "training.trackers",
  }  # entries
  assert fields - {*CHOICES, *BOUNDED} == free | of_tuples
  seeds = {"training.seed", "evaluation.seed"}
  assert {*MINIMA, *INTERVALS, *SIZES, *seeds} == {*BOUNDED}


@pytest.mark.parametrize(
  "config, field, problem",
  [
    (RunConfig(environment="calculator"), "environment", "a str is not"),
    (RunConfig(environment=Toy), "environment", "a type is not"),
    (RunConfig(environment=Unfrozen()), "environment", "a Unfrozen is not an instance of a frozen dataclass"),
    (RunConfig(environment=Incomplete()), "environment", "Incomplete has no make, prompts, tokenizer"),
    (
      RunConfig(Toy(), algorithm=AlgorithmConfig(epsilon_low="0.3")),
      "algorithm.epsilon_low",
      "'0.3' (str), expected float",
    ),
    (
      RunConfig(Toy(), algorithm=AlgorithmConfig(value_updates=2.0)),
      "algorithm.value_updates",
      "2.0 (float), expected int",
    ),
    (RunConfig(Toy(), model=None), "model", "None (NoneType), expected ModelConfig"),
    (RunConfig(Toy(name=3)), "environment.name", "3 (int), expected str"),
  ],
)
def test_values_of_the_wrong_type(config, field, problem):
  with pytest.raises(ConfigError) as error:
    validate(config, training=True)
  assert error.value.field == field and problem in error.value.problem and error.value.remedy


def test_a_prompt_that_fills_the_context():
  """The toy's prompts have two tokens."""
  config = training_toy.get_config()
  check_prompts(training_toy.replace(config, sampler={"context_length": 3}))
  with pytest.raises(ConfigError, match="has 2 tokens, which leaves no room") as error:
    check_prompts(training_toy.replace(config, sampler={"context_length": 2}))
  assert error.value.field == "sampler.context_length" and "above 2" in error.value.remedy


def test_an_environment_that_fails_or_hangs_does_not_stop_the_check_of_prompts():
  class Broken(training_toy.ParityEpisode):
    async def reset(self, prompt):
      if prompt.data["number"] % 2:
        await asyncio.sleep(60)
      raise OSError("no server")

  @dataclasses.dataclass(frozen=True)
  class Spec(training_toy.Parity):
    make = staticmethod(lambda tokenizer: Broken())

  config = dataclasses.replace(training_toy.get_config(), environment=Spec())
  check_prompts(training_toy.replace(config, rollout={"environment_timeout": 0.01}))


def test_a_batch_of_demonstrations_counts_where_there_are_any():
  sizes = {"rollout.batch_size": 4, "sft.batch_size": 4096}
  validate(config_tree.replace(VALID, sizes), training=True)
  with pytest.raises(ConfigError, match=r"(?s)rollout.row_counts: .* a batch has 4096.*sft.batch_size"):
    validate(config_tree.replace(RunConfig(environment=Demonstrated()), sizes), training=True)
