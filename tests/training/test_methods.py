"""Every advantage that a run can choose, in whole runs: it learns, resumes and can be replayed; GRPO has no critic."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from toys import training_toy

from sao_jax.algorithm.train_step import ADVANTAGES
from sao_jax.environments.base import StepResult
from sao_jax.errors import ConfigError
from sao_jax.learner import placement, setup
from sao_jax.report.metrics import read_metrics
from sao_jax.training import loop, replay
from sao_jax.training.consumed import Record

STEPS = 28
METHODS = {
  "sao": {"algorithm": {"critic_warmup_steps": 2}},
  "grpo": {
    "algorithm": {"advantage": "grpo", "critic_warmup_steps": 0},
    "rollout": {"group_size": 4},
  },
  "dr_grpo": {
    "algorithm": {
      "advantage": "dr_grpo",
      "policy_loss": "gspo",
      "policy_loss_reduction": "constant",
      "loss_length": 8,
      "epsilon_low": 0.05,
      "epsilon_high": 0.05,
      "critic_warmup_steps": 0,
    },
    "rollout": {"group_size": 4},
  },
  "running_mean": {
    "algorithm": {
      "advantage": "running_mean",
      "baseline_scope": "global",
      "baseline_window": 128,
      "policy_loss": "cispo",
      "policy_loss_reduction": "sequence_mean",
      "critic_warmup_steps": 0,
    },
  },
}


class EvenEpisode(training_toy.ParityEpisode):
  """One turn; the reward is 1 when its last id, a stop token as a rule, is even."""

  async def step(self, action_ids):
    return StepResult([], True, float(action_ids[-1] % 2 == 0))


@dataclasses.dataclass(frozen=True)
class Even(training_toy.Parity):
  """Its settings."""

  make = staticmethod(lambda tokenizer: EvenEpisode())


def get_config(method: str, steps: int = STEPS):
  config = training_toy.replace(
    dataclasses.replace(training_toy.get_config(), environment=Even()),
    rollout={"batch_size": 16, "row_counts": (16,), "record": True},
    sampler={"num_slots": 16},
    policy_optimizer={"learning_rate": 1e-2},
    critic_optimizer={"learning_rate": 1e-2},
    training={"steps": steps, "audit": False, "checkpoint_every": 100},
  )
  return training_toy.replace(config, **METHODS[method])


@pytest.fixture(scope="module", params=sorted(METHODS))
def run(request, tmp_path_factory):
  """A run that was stopped half way and went on."""
  workdir = tmp_path_factory.mktemp(request.param)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
    loop.train(get_config(request.param, STEPS // 2), workdir)
    yield request.param, workdir, loop.train(get_config(request.param), workdir)


def test_every_method_is_tried():
  assert METHODS.keys() == ADVANTAGES.keys()


def test_it_learns(run):
  method, workdir, result = run
  rewards = [line["reward_mean"] for line in read_metrics(workdir, "train")]
  warm_up = METHODS[method]["algorithm"]["critic_warmup_steps"]
  assert len(rewards) == result.step == STEPS + warm_up and int(result.state.policy_version) == STEPS
  assert np.mean(rewards[: 4 + warm_up]) < 0.75 < 0.85 < np.mean(rewards[-6:])


def test_it_can_be_replayed(run):
  method, workdir, result = run
  replayed = replay.replay(get_config(method), workdir)
  assert replayed.identical and replayed.steps == result.step


def test_whole_groups_are_trained(run):
  method, workdir, _ = run
  record = Record(workdir, "train")
  for step in (1, STEPS):
    groups = [trajectory.group for trajectory in record.read(step)]
    assert {groups.count(group) for group in groups} == {METHODS[method].get("rollout", {}).get("group_size", 1)}


def test_a_running_mean_is_that_of_the_returns_trained_on_before(run):
  """Over the whole run, across its interruption: the newest 128 returns of earlier steps, in their order."""
  method, workdir, _ = run
  if method != "running_mean":
    assert all(t.baseline is None for t in Record(workdir, "train").read(1))
    return
  seen = []
  for step in range(1, STEPS + 1):
    batch = Record(workdir, "train").read(step)
    expected = np.mean(seen[-128:]) if seen else 0.0
    np.testing.assert_allclose([t.baseline for t in batch], expected, rtol=1e-12)
    seen += [t.reward for t in batch]


def test_there_is_a_critic_only_where_one_is_needed(run):
  method, workdir, result = run
  line = read_metrics(workdir, "train")[-1]
  wanted = get_config(method).algorithm.needs_critic
  assert (result.state.critic is not None) == wanted == ("explained_variance" in line)
  assert wanted == any((workdir / "train").glob("*/*critic*"))
  assert (setup.make_learner(get_config(method)).critic is not None) == wanted


def test_a_method_without_a_critic_has_none_to_pretrain(tmp_path):
  with pytest.raises(ConfigError, match="(?s)algorithm.advantage.*no critic.*remedy"):
    loop.pretrain_value(get_config("grpo"), tmp_path)
  assert not any(tmp_path.iterdir())
