"""Runs that train LoRA's factors: from what they start, what stays fixed, what is published and exported."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from toys import training_toy
from toys.runs import assert_identical, interrupted_after

from sao_jax.checkpoints.checkpointer import load_params
from sao_jax.config import LoRAConfig
from sao_jax.configuration import config_tree
from sao_jax.errors import ConfigError
from sao_jax.huggingface import convert
from sao_jax.huggingface.load import import_policy
from sao_jax.learner import placement, sampler_side, setup
from sao_jax.models.lora import merge_lora
from sao_jax.parallel.params import path_names
from sao_jax.report.metrics import read_metrics
from sao_jax.training import loop, phases, replay, sft
from sao_jax.training.consumed import Record


def full_config():
  """The toy run with more experts than a token uses."""
  return training_toy.replace(training_toy.get_config(), model={"num_experts": 4})


def config_of():
  """The same with factors of rank 2 and a router that is replayed."""
  return training_toy.replace(
    full_config(), model={"lora": LoRAConfig(rank=2, alpha=8.0)}, algorithm={"router_replay": True}
  )


@pytest.fixture
def one_device(monkeypatch):
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """SFT without factors; then value pretraining and RL with them."""
  workdir = tmp_path_factory.mktemp("lora")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
    sft.sft(full_config(), workdir)
    config = config_of()
    loop.pretrain_value(config, workdir)
    result = loop.train(config, workdir)
  return config, workdir, result


def test_the_base_stays_and_the_factors_train(finished):
  """Bit for bit; there is no optimiser state for the base. The audit has compared both sides at 1e-4 before."""
  config, workdir, result = finished
  imitated = load_params(workdir / "sft")
  params = result.state.policy.params
  jax.tree.map(np.testing.assert_array_equal, {name: params[name] for name in imitated}, imitated)
  started = setup.init_policy_params(setup.make_learner(config, tuple(jax.devices()[:1])), config.training.seed)["lora"]
  assert params["lora"]["scale"] == started["scale"] == 4.0
  factors = [{name: tree[name] for name in ("a", "b")} for tree in (params["lora"], started)]
  moved = [np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, factors))]
  assert all(moved) and len(moved) == 2 * (4 + 3)
  moments = {"/".join(str(k.key) for k in path) for path, _ in jax.tree_util.tree_leaves_with_path(mu_of(result))}
  assert moments == {f"lora/{name}" for name in path_names(factors[0])}
  assert {*path_names(imitated), "lora/scale"} == setup.make_learner(config).policy.frozen


def mu_of(result):
  return result.state.policy.opt_state[1][0].mu


def test_the_whole_run_replayed_the_samplers_experts(finished):
  _, workdir, result = finished
  lines = [line for line in read_metrics(workdir, "train") if line["policy_loss"] is not None]
  assert len(lines) == 4 and result.step == 5
  for line in lines:
    assert line["router_replayed"] > 0.5 and line["router_agreement"] > 0.9 and line["router_dropped"] == 0


def test_what_is_published_is_merged(finished):
  config, _, result = finished
  learner = setup.make_learner(config, tuple(jax.devices()[:1]))
  params = jax.device_get(result.state.policy.params)
  published = sampler_side.make_publisher(learner)(result.state.policy.params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), published, merge_lora(params))
  assert np.abs(published["moe_layers"]["attention"]["q"] - params["moe_layers"]["attention"]["q"]).max() > 1e-5


def test_what_is_exported_is_merged(finished, tmp_path):
  """In a format that a family has, with tensors of the merged policy, and without a trace of the factors."""
  config, workdir, result = finished
  recorded = full_config()  # the scale is the checkpoint's, whatever was recorded last
  (workdir / convert.RUN_CONFIG).write_text(json.dumps(config_tree.to_json(recorded)))
  convert.to_hf(workdir / "train", tmp_path / "hf")
  expected = merge_lora(jax.device_get(result.state.policy.params), keep_dtype=True)
  exported = import_policy(tmp_path / "hf", config.model)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), exported, expected)


def test_another_scale_is_refused(finished, tmp_path):
  """Factors mean nothing without theirs: when a run goes on, and when another one, or an evaluation, starts on them."""
  config, workdir, _ = finished
  other = training_toy.replace(config, model={"lora": dataclasses.replace(config.model.lora, alpha=16.0)})
  message = "model.lora.alpha: 16.0 was set, the factors in the checkpoint belong to 8"
  with pytest.raises(ConfigError, match=message):
    loop.train(other, workdir)
  with pytest.raises(ConfigError, match=message):
    phases.latest_policy(other, setup.make_learner(other), workdir)
  elsewhere = training_toy.replace(other, model={"checkpoint": str(workdir / "train")})
  with pytest.raises(ConfigError, match=message):
    sft.sft(elsewhere, tmp_path)


def test_a_deterministic_run_with_replay_goes_on_and_is_replayed_identically(one_device, tmp_path):
  """Buffered trajectories keep their experts in a checkpoint, and consumed ones in the record."""
  config = training_toy.replace(
    config_of(),
    rollout={"deterministic": True},
    training={"steps": 4, "audit": False},
    algorithm={"critic_warmup_steps": 0},
  )
  expected = loop.train(config, tmp_path / "whole")
  with interrupted_after(2):
    assert loop.train(config, tmp_path / "cut").step == 2
  assert_identical(loop.train(config, tmp_path / "cut").state, expected.state)
  assert replay.replay(config, tmp_path / "cut").identical
  trajectories = Record(tmp_path / "cut", "train").read(4)
  assert all((one.routed_experts[:-1] >= 0).all() for one in trajectories)
  others = [np.where(one.routed_experts < 0, -1, 3 - one.routed_experts) for one in trajectories]
  changed = [dataclasses.replace(one, routed_experts=each) for one, each in zip(trajectories, others, strict=True)]
  Record(tmp_path / "cut", "train").write(4, changed)
  assert not replay.replay(config, tmp_path / "cut").identical


def test_a_critic_starts_from_the_merged_policy(one_device, tmp_path):
  """Also when SFT has trained the factors before."""
  config = config_of()
  params = sft.sft(config, tmp_path)
  learner = setup.make_learner(config)
  state = phases.initial_state(config, learner, tmp_path, phases.value_pretraining(config))
  expected = merge_lora(jax.device_get(params))
  critic = state.critic.params
  for name in ("embed", "moe_layers", "final_norm"):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), critic[name], expected[name])
  jax.tree.map(np.testing.assert_array_equal, state.policy.params, params)
  assert np.abs(critic["moe_layers"]["attention"]["q"] - params["moe_layers"]["attention"]["q"]).max() > 1e-6
  policy, _, phase, _ = phases.latest_policy(config, learner, tmp_path)
  assert phase == "sft" and "lora" in policy
  with pytest.raises(ConfigError, match="policy/lora"):  # without LoRA this is another model
    phases.latest_policy(full_config(), setup.make_learner(full_config()), tmp_path)
