"""The audit before the first step catches what makes sampler and learner disagree."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import training_toy
from toys.trajectories import make_trajectories

from sao_jax.episode import EnvironmentFailure
from sao_jax.errors import ConfigError
from sao_jax.evaluation import audit
from sao_jax.interrupt import Interrupt
from sao_jax.learner import placement, sampler_side, setup
from sao_jax.learner.packing import pack
from sao_jax.models.policy import make_policy_apply
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import init_params, path_name
from sao_jax.report.metrics import read_metrics
from sao_jax.training import loop, phases
from sao_jax.types import PolicyOutputs

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


def test_a_batch_is_compared_in_micro_batches(monkeypatch):
  """All rows at once might need more memory than any train step."""
  config = training_toy.replace(training_toy.get_config(), algorithm={"micro_batches": 4})
  learner, seen = setup.make_learner(config, tuple(jax.devices()[:1])), []

  def apply(params, rows):
    seen.append(rows.token_ids.shape[0])
    return PolicyOutputs(*jnp.zeros((2, *rows.token_ids.shape)))

  learner = dataclasses.replace(learner, policy=dataclasses.replace(learner.policy, apply=apply))
  monkeypatch.setattr(audit, "run_episodes", lambda *unused, **options: (make_trajectories()[:4], []))
  with pytest.raises(audit.SamplerMismatch):
    audit.audit_sampler(config, learner, None, {})
  assert seen == [2]


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


class Flaky(training_toy.ParityEpisode):
  """Fails on the tasks below a number."""

  async def reset(self, prompt):
    if prompt.data["number"] % 8 < prompt.data["failing"]:
      raise EnvironmentFailure(self.name, "the server has gone")
    return await super().reset(prompt)


@dataclasses.dataclass(frozen=True)
class FlakyParity(training_toy.Parity):
  """`failing` of eight tasks fail; the held-out split may be empty."""

  failing: int = 0
  heldout: bool = True
  make = staticmethod(lambda tokenizer: Flaky())

  def prompts(self, tokenizer, split, seed):
    prompts = super().prompts(tokenizer, split, seed) if split == "train" or self.heldout else []
    return [dataclasses.replace(prompt, data=prompt.data | {"failing": self.failing}) for prompt in prompts]


@pytest.fixture(scope="module")
def sampled():
  """Learner, sampler and parameters of the toy run on one device; its batches hold four trajectories."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
    config = training_toy.replace(training_toy.get_config(), rollout={"row_counts": (4,), "environment_retries": 0})
    learner = setup.make_learner(config)
    params = setup.init_policy_params(learner, 0)
    with sampler_side.make_service(config, sampler_side.make_publisher(learner)(params), seed=0) as service:
      yield config, learner, service, params


def test_trainer_and_sampler_agree_at_another_temperature_than_one(sampled):
  """With a head of strong opinions; the sampler divides by its temperature, the learner by that of the sampler."""
  config, learner, service, params = sampled
  strong = params | {"head": 20.0 * params["head"]}
  hot = training_toy.replace(config, sampler={"temperature": 0.5})
  service.publish(sampler_side.make_publisher(learner)(strong), 1)
  try:
    found = audit.audit_sampler(hot, setup.make_learner(hot), service, strong)
    assert found.compared == 4 and found.worst < 1e-5
    with pytest.raises(ConfigError, match="temperature"):
      audit.audit_sampler(hot, learner, service, strong)
  finally:
    service.publish(sampler_side.make_publisher(learner)(params), 2)


@pytest.mark.parametrize(
  "environment, compared, says",
  [
    (FlakyParity(), 4, r"agree to \S+ at lag 0 \(4 episodes\)"),
    (FlakyParity(failing=1), 3, r"agree to \S+ at lag 0 \(3 episodes; 1 failed, the first of .*the server has gone"),
    (FlakyParity(heldout=False), 4, r"agree to \S+ at lag 0 \(4 episodes\)"),
    (FlakyParity(failing=8), 0, r"nothing to compare \(0 episodes; 4 failed, the first of .*the server has gone"),
  ],
)
def test_the_audit_compares_what_there_is(sampled, caplog, environment, compared, says):
  """A batch of four, one failing task in eight, no held-out split, no task that works."""
  config, learner, service, params = sampled
  config = dataclasses.replace(config, environment=environment)
  found = audit.audit_sampler(config, learner, service, params)
  assert found.compared == compared and (found.worst is None) == (compared == 0)
  caplog.set_level("INFO", logger="absl")
  audit.audit_at_start(config, learner, service, params, Interrupt())
  assert re.search(says, caplog.records[-1].getMessage())
  assert caplog.records[-1].levelname == ("INFO" if compared else "WARNING")
