"""The benchmark: its arithmetic by hand, its way of timing, and all suites once on tiny shapes."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from toys import training_toy

from launch import benchmark
from sao_jax.benchmarks import generation, learning, recompilation, suites, timing
from sao_jax.benchmarks.scale import FULL, QUICK
from sao_jax.config import ModelConfig
from sao_jax.learner import placement
from sao_jax.models.critic import frozen_critic_paths
from sao_jax.training import loop


def test_interleaving_calls_everything_in_turn_after_a_round_that_is_not_timed():
  calls = []
  seconds = timing.interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
  assert calls == ["a", "b"] * 4
  assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}
  assert min(seconds["a"] + seconds["b"]) >= 0


def test_a_compilation_is_never_timed():
  sizes = iter(range(3, 9))
  alternatives = {"new shapes": lambda: jax.jit(lambda x: x * 3 + 1)(jnp.ones(next(sizes), jnp.float32))}
  with pytest.raises(RuntimeError, match="compiled while timed"):
    timing.interleave(alternatives, rounds=2)


def test_ratios_are_taken_within_a_round():
  assert timing.median_ratio([1.0, 10.0, 3.0], [2.0, 20.0, 1.0]) == 0.5
  with pytest.raises(ValueError):
    timing.median_ratio([1.0], [1.0, 2.0])


SMALL = ModelConfig(vocab_size=10, num_layers=2, d_model=4, num_heads=2, num_kv_heads=1, head_dim=3, d_ff=5)
ATTENTION = 2 * (4 * 6 + 4 * 3 + 4 * 3 + 6 * 4)  # q, k, v, o of two layers


def test_flops_of_a_dense_model_by_hand():
  feed_forward, head, value_head = 2 * 3 * 4 * 5, 4 * 10, 4
  assert timing.decode_flops(SMALL) == 2 * (ATTENTION + feed_forward + head)
  everything = 2 * (ATTENTION + feed_forward) + head + value_head
  assert timing.train_flops(SMALL) == 6 * everything
  assert timing.train_flops(SMALL, frozen_critic_paths(SMALL)) == 6 * everything - 2 * ATTENTION


def test_flops_of_experts_count_the_active_ones():
  for num_experts in (4, 16):
    config = dataclasses.replace(SMALL, num_experts=num_experts, num_experts_per_token=2, d_ff_expert=7, d_ff_shared=3)
    layer = 4 * num_experts + 2 * 3 * 4 * 7 + 3 * 4 * 3  # router, two experts, the shared one
    assert timing.decode_flops(config) == 2 * (ATTENTION + 2 * layer + 4 * 10)


def test_the_workload_is_that_of_the_figures():
  lengths = generation.uneven_lengths(FULL)
  prompts, answers = zip(*lengths)
  assert len(lengths) == 256 and min(prompts) == 8 and max(prompts) == 64
  assert min(answers) == 16 and max(answers) == 128
  assert 22 < sorted(answers)[128] < 29  # the median of 16 · (1 + Pareto(1.5)) is 16 · 2^(2/3) = 25
  assert FULL.slots[-1] == 64 and (FULL.rows, FULL.tokens) == (64, 128)
  assert FULL.moe.num_experts == 8 and FULL.moe.d_ff_expert == 128 and FULL.dense.d_ff == 384


@pytest.fixture(autouse=True)
def two_devices(monkeypatch):
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:2]))


def check_numbers(results):
  """Every figure is finite, and positive unless it is a count."""
  for name, value in suites.flatten(results).items():
    if isinstance(value, float):
      assert math.isfinite(value) and value > 0, name


@pytest.fixture
def parse():
  """Parses a command line of the launcher; afterwards the flags are as before."""
  yield lambda *arguments: flags.FLAGS(["benchmark", *arguments])
  flags.FLAGS.unparse_flags()


def test_the_launcher_prints_json_alone(parse, capsys):
  parse("--suite=sampler,batching", "--quick", "--cpu_devices=0")
  benchmark.main()
  output = capsys.readouterr()
  results = json.loads(output.out)
  assert list(results) == ["machine", "sampler", "batching"]
  check_numbers(results)
  for model in ("dense", "moe"):
    assert {"1_slots", "4_slots", "gemm_flops_per_second"} == results["sampler"][model].keys()
    batching = results["batching"][model]
    assert batching["waves_padded_tokens_per_second"] > batching["waves_useful_tokens_per_second"]
    assert not [name for name in batching if "tunix" in name]  # no ratio to what did not run
  assert "sampler" in output.err and "batching" in output.err


def test_the_launcher_refuses_what_it_does_not_know(parse):
  with pytest.raises(flags.IllegalFlagValueError, match="Choose some of sampler, batching"):
    parse("--suite=speed")


def test_learning():
  scale = dataclasses.replace(QUICK, dense=QUICK.moe, experts=(2,))  # one program for all of them
  results = learning.train_step(scale) | learning.experts(scale)
  check_numbers(results)
  for model in ("dense", "moe"):
    for steps in ("attention_frozen", "nothing_frozen"):
      assert {"tokens_per_second", "share_of_gemm"} == results[model][steps].keys()
  assert results["train_step"] == {"2_experts": 1.0, "highest_over_lowest": 1.0}
  assert results["layer_forward_and_backward"].keys() == results["train_step"].keys()


def test_nothing_is_compiled_once_a_run_has_settled():
  run = training_toy.replace(training_toy.get_config(), training={"steps": 6, "audit": False, "checkpoint_every": 1})
  results = recompilation.recompilation(dataclasses.replace(QUICK, run=run))
  assert results["train_steps"] == 7
  assert results["compiled_before_third_step"] > 0
  assert results["late_programs"] == [] and results["compiled_after_third_step"] == 0


def test_rows_and_slots_are_rounded_up_to_the_devices():
  run = recompilation.fit_to_devices(QUICK.run, 3)
  assert run.rollout.row_counts == (18, 24, 42) and run.sampler.num_slots == 33
  assert recompilation.fit_to_devices(QUICK.run, 2) == QUICK.run


def test_rows_are_shared_by_as_many_devices_as_divide_them(monkeypatch):
  monkeypatch.setattr(placement, "local_devices", lambda: ("a", "b", "c"))
  assert learning.sharing_devices(64) == ("a", "b")
  assert learning.sharing_devices(9) == ("a", "b", "c")
  assert learning.sharing_devices(5) == ("a",)


def test_a_run_that_ended_early_says_nothing_about_recompilation(monkeypatch):
  ended = loop.Result(state=None, step=1, interrupted=True, evaluation=None)
  monkeypatch.setattr(recompilation.sft, "sft", lambda run, workdir: None)
  monkeypatch.setattr(recompilation.loop, "train", lambda run, workdir: ended)
  with pytest.raises(RuntimeError, match="1 train steps of 6"):
    recompilation.recompilation(QUICK)
