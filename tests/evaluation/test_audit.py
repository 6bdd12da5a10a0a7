"""The audit before the first step catches what makes sampler and learner disagree."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import training_toy
from toys.trajectories import make_trajectories

from sao_jax.errors import ConfigError
from sao_jax.evaluation import audit
from sao_jax.learner import placement, sampler_side, setup
from sao_jax.learner.packing import pack
from sao_jax.models.policy import make_policy_apply
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import init_params, path_name
from sao_jax.report.metrics import read_metrics
from sao_jax.training import loop, phases

MODEL = training_toy.get_config().model


@pytest.fixture(scope="module")
def evidence():
  """Parameters, and a batch whose behaviour log-probs are exactly theirs."""
  params = init_params(param_specs(MODEL), jax.random.key(0))
  params["head"] = 20.0 * params["head"]  # opinions strong enough that a temperature shows
  batch = jax.tree.map(jnp.asarray, pack(make_trajectories(), (32,), (16,)))
  logprobs = jax.jit(make_policy_apply(MODEL))(params, batch).logprobs
  return params, batch.replace(behavior_logprobs=jnp.where(batch.action_mask, logprobs, jnp.nan))


def test_agreement_passes_and_is_measured(evidence):
  params, batch = evidence
  assert audit.compare(make_policy_apply(MODEL), params, batch, 1e-4) <= 1e-6


@pytest.mark.parametrize("fault", ["temperature", "weights", "nan", "other sampler temperature"])
def test_disagreement_is_refused_with_a_remedy(evidence, fault):
  params, batch = evidence
  policy_apply = make_policy_apply(MODEL)
  if fault == "temperature":
    policy_apply = make_policy_apply(MODEL, temperature=0.7)
  elif fault == "weights":
    params = dict(params, embed=params["embed"] + 0.01)
  elif fault == "nan":
    batch = batch.replace(behavior_logprobs=jnp.full_like(batch.behavior_logprobs, jnp.nan))
  else:
    batch = batch.replace(behavior_logprobs=batch.behavior_logprobs * 0.9)
  with pytest.raises(ConfigError, match=r"(?s)training.audit_tolerance: .*differ by up to.*remedy"):
    audit.compare(policy_apply, params, batch, 1e-4)


def test_a_run_whose_sampler_has_other_weights_trains_no_step(tmp_path, monkeypatch):
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))

  def make_wrong_publisher(learner):
    publish = sampler_side.make_publisher(learner)

    def publish_wrong(params):
      published = publish(params)
      return published | {"head": 1.5 * published["head"]}

    return publish_wrong

  monkeypatch.setattr(loop, "make_publisher", make_wrong_publisher)
  with pytest.raises(ConfigError, match=r"(?s)training.audit_tolerance: .*differ by up to.*remedy"):
    loop.train(training_toy.get_config(), tmp_path)
  assert not read_metrics(tmp_path) and phases.latest_step(tmp_path / phases.TRAIN) is None


def test_publishing_to_a_bf16_sampler_keeps_what_is_read_in_fp32():
  config = training_toy.replace(training_toy.get_config(), model={"dtype": "bfloat16"})
  learner = setup.make_learner(config, tuple(jax.devices()[:1]))
  learner = dataclasses.replace(learner, config=config)
  published = sampler_side.make_publisher(learner)(setup.init_policy_params(learner, 0))
  fp32 = {
    path_name(path)
    for path, leaf in jax.tree_util.tree_leaves_with_path(published)
    if leaf.dtype == np.dtype("float32")
  }
  attention = {f"moe_layers/attention/{name}" for name in ("q_norm", "k_norm")}
  norms = {"final_norm", "moe_layers/attention_norm", "moe_layers/mlp_norm"}
  assert fp32 == attention | norms | {"moe_layers/moe/router"}
