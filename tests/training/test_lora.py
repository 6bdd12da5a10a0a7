"""Runs that train LoRA's factors: from what they start, what stays fixed, what is published and exported."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from toys import training_toy
from toys.runs import assert_identical, interrupted_after

from sao_jax.checkpoints.checkpointer import Checkpointer, load_params
from sao_jax.config import CriticConfig, LoRAConfig
from sao_jax.configuration import config_tree
from sao_jax.errors import ConfigError
from sao_jax.huggingface import convert
from sao_jax.huggingface.folder import HFFolder
from sao_jax.huggingface.load import import_policy, load_leaves
from sao_jax.huggingface.safetensors_file import read_header
from sao_jax.learner import placement, sampler_side, setup
from sao_jax.learner.lora_start import fresh_critic
from sao_jax.models.critic import critic_specs
from sao_jax.models.critic_lora import join_base
from sao_jax.models.lora import merge_lora
from sao_jax.parallel.params import path_name, path_names
from sao_jax.report.metrics import read_metrics
from sao_jax.training import loop, phases, replay, sft
from sao_jax.training.consumed import Record


def full_config():
  """The toy run with more experts than a token uses."""
  return training_toy.replace(training_toy.get_config(), model={"num_experts": 4})


def config_of():
  """The same with factors of rank 2, of rank 3 for a critic that reads log-probs, and a router that is replayed."""
  config = training_toy.replace(
    full_config(),
    model={"lora": LoRAConfig(rank=2, alpha=8.0)},
    algorithm={"router_replay": True, "critic_reads_logprobs": True},
  )
  return dataclasses.replace(config, critic=CriticConfig(LoRAConfig(rank=3, alpha=6.0)))


def with_full_critic(config):
  return dataclasses.replace(config, critic=CriticConfig())


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
  moments = moments_of(result.state.policy)
  assert moments == {f"lora/{name}" for name in path_names(factors[0])}
  assert {*path_names(imitated), "lora/scale"} == setup.make_learner(config).policy.frozen


def moments_of(network):
  return set(network.opt_state[1][0].mu)


def test_a_critic_trains_its_factors_and_head_on_the_policys_base(finished):
  """It has no base of its own, in memory or on disk. Attention's factors train in value pretraining, not in RL."""
  config, workdir, result = finished
  critic, learner = result.state.critic, setup.make_learner(config, tuple(jax.devices()[:1]))
  factors = {f"lora/{name}" for name in path_names(critic.params["lora"]) if name != "scale"}
  assert set(path_names(critic.params)) == {"value_head", "logprob_embed", "lora/scale"} | factors
  of_attention = {name for name in factors if "/attention/" in name}
  assert len(factors) == 2 * (4 + 3) and len(of_attention) == 2 * 4
  assert moments_of(critic) == {"value_head", "logprob_embed"} | factors - of_attention

  # Moved in each phase: everything that trains there, and nothing else.
  started = fresh_critic(learner, load_params(workdir / "sft") | {"lora": learner_lora(learner)}, config.training.seed)
  pretrained, trained = (load_params(workdir / phase, "critic") for phase in ("value_pretraining", "train"))
  assert moved(started, pretrained) == {"value_head", "logprob_embed"} | factors
  assert moved(pretrained, trained) == moments_of(critic)
  assert not moved(trained, critic.params)
  stored = lambda folder, item: sum(path.stat().st_size for path in (folder / item).rglob("*") if path.is_file())
  (checkpoint,) = (folder for folder in (workdir / "train").iterdir() if folder.name == str(result.step))
  assert stored(checkpoint, "critic") < 0.8 * stored(checkpoint, "policy")


def learner_lora(learner):
  return setup.init_policy_params(learner, learner.config.training.seed)["lora"]


def moved(before, after):
  pairs = zip(*(jax.tree_util.tree_leaves_with_path(jax.device_get(tree)) for tree in (before, after)), strict=True)
  return {path_name(path) for (path, a), (_, b) in pairs if np.any(np.asarray(a) != np.asarray(b))}


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


def test_the_critic_is_exported_merged_onto_the_base(finished, tmp_path):
  """As any critic: the trunk in the policy's format, and the file of its head."""
  config, workdir, result = finished
  (workdir / convert.RUN_CONFIG).write_text(json.dumps(config_tree.to_json(config)))
  convert.to_hf(workdir / "train", tmp_path / "hf", network="critic")
  state = jax.device_get(result.state)
  expected = merge_lora(join_base(state.critic.params, state.policy.params), keep_dtype=True)
  folder = HFFolder(tmp_path / "hf")
  trunk = {name: spec for name, spec in critic_specs(config.model).items() if name != "value_head"}
  exported = load_leaves(folder, folder.family.tensor_table(config.model, trunk), trunk, None)
  heads = read_header(tmp_path / "hf" / "value_head.safetensors")
  exported["value_head"] = heads["value_head.weight"].read().T
  exported["logprob_embed"] = heads["logprob_embed.weight"].read()
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), exported, expected)
  assert moved(exported["moe_layers"]["attention"], state.policy.params["moe_layers"]["attention"]) == {*"qkvo"}


def test_another_kind_of_critic_is_refused(finished, tmp_path):
  """A run that goes on, RL behind value pretraining, and a critic beside model.checkpoint; in both directions."""
  config, workdir, _ = finished
  full = with_full_critic(config)
  as_it_was = r"(?s)critic/embed: expected float32.* no such array.*critic.lora.rank.*as LoRA: set it as it was"
  with pytest.raises(ConfigError, match=as_it_was):
    loop.train(full, workdir)
  for folder in ("config.json", phases.VALUE_PRETRAINING):
    (tmp_path / folder).symlink_to(workdir / folder)
  with pytest.raises(ConfigError, match=as_it_was):
    loop.train(full, tmp_path)

  # A critic that trains in full, whose policy is the same.
  beside = training_toy.replace(full, model={"checkpoint": str(workdir / "train")})
  with pytest.raises(
    ConfigError, match=r"(?s)the critic beside that policy does not fit: expected.*no such array.*critic.lora"
  ):
    phases.initial_state(beside, setup.make_learner(beside), tmp_path / "own", phases.value_pretraining(beside))
  state = setup.abstract_state(setup.make_learner(full))
  in_full = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
  with Checkpointer(tmp_path / "full" / phases.TRAIN) as checkpointer:
    checkpointer.save(1, in_full, {"rollouts": [], "policy_version": 0})
  with pytest.raises(ConfigError, match=r"(?s)critic/.*critic.lora.rank.*in full: set critic.lora.rank=0"):
    loop.train(config, tmp_path / "full")

  # The same factors on a base of their own.
  alone = training_toy.replace(config, model={"lora": LoRAConfig()})
  specs = setup.make_learner(alone).critic.specs
  with pytest.raises(ConfigError, match=r"(?s)critic/embed.*model.lora.rank is another.*a policy with LoRA"):
    load_params(workdir / "train", "critic", setup.sharded_specs(specs, setup.make_learner(alone).layout))


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
  scaled = dataclasses.replace(config, critic=CriticConfig(LoRAConfig(rank=3, alpha=3.0)))
  with pytest.raises(ConfigError, match="critic.lora.alpha: 3.0 was set, the factors in the checkpoint belong to 6"):
    loop.train(scaled, workdir)


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
  config = with_full_critic(config_of())
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
