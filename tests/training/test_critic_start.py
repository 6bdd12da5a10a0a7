"""Where the critic comes from: a policy's trunk with a new head, whatever shape its language-model head has."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from toys import training_toy as toy

from sao_jax.checkpoints.checkpointer import Checkpointer, load_params
from sao_jax.errors import ConfigError
from sao_jax.learner import setup
from sao_jax.training import phases

SCALAR = toy.get_config()
# As many bins as tokens: the two heads have the same shape, and only their names tell them apart.
BINS = toy.replace(SCALAR, algorithm={"value_head": "hl_gauss", "value_bins": toy.VOCABULARY})


@pytest.fixture(params=[SCALAR, BINS], ids=["scalar", "as many bins as tokens"])
def run(request, tmp_path):
  """A configuration, its learner, and a folder with the checkpoint of an imitation phase."""
  learner = setup.make_learner(request.param, tuple(jax.devices()[:1]))
  policy = setup.init_policy_params(learner, seed=3)
  with Checkpointer(tmp_path / phases.SFT) as checkpointer:
    checkpointer.save(3, setup.make_network_state(learner.policy, learner.layout, policy))
  return request.param, learner, tmp_path, jax.device_get(policy)


def test_the_head_of_a_policy_checkpoint_is_never_a_value_head(run):  # G7
  config, learner, workdir, policy = run
  state = phases.initial_state(config, learner, workdir, phases.reinforcement_learning(config))
  critic = jax.device_get(state.critic.params)
  head = critic.pop("value_head")
  assert head.shape == (16, learner.critic.specs["value_head"].shape[-1]) and not head.any()
  expected = {name: leaf for name, leaf in policy.items() if name != "head"}
  assert policy["head"].any() and "head" not in critic
  jax.tree.map(np.testing.assert_array_equal, critic, expected)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.policy.params), policy)


def test_a_policy_checkpoint_is_no_critic(run):
  _, learner, workdir, _ = run
  with pytest.raises(ConfigError, match="no critic"):
    load_params(workdir / phases.SFT, "critic")
  with pytest.raises(ConfigError, match="policy/(value_)?head"):
    load_params(workdir / phases.SFT, "policy", setup.sharded_specs(learner.critic.specs, learner.layout))


@pytest.mark.parametrize("run", [SCALAR], indirect=True)
def test_a_pretrained_critic_with_the_head_of_a_language_model_is_refused(run):
  config, learner, workdir, policy = run
  state = phases.initial_state(config, learner, workdir, phases.value_pretraining(config))
  params = state.critic.params | {"value_head": policy["head"]}
  with Checkpointer(workdir / phases.VALUE_PRETRAINING) as checkpointer:
    checkpointer.save(1, state.replace(critic=state.critic.replace(params=params)))
  with pytest.raises(ConfigError, match=r"critic/value_head: expected float32\[16, 1\], found float32\[16, 32\]"):
    phases.initial_state(config, learner, workdir, phases.reinforcement_learning(config))


@pytest.mark.parametrize("run", [SCALAR], indirect=True)
def test_a_run_whitens_by_the_critic_that_it_began_with(run):
  """After value pretraining advantages stay raw; a resume asks the checkpoint, and one of 0.1.0 whitened."""
  config, learner, workdir, _ = run
  config = toy.replace(config, algorithm={"critic_warmup_steps": 9})
  phase, cold, pretrained = phases.reinforcement_learning(config), True, False

  def settled(**host_state):
    """What holds where the phase begins, or goes on from a checkpoint with this host state."""
    with Checkpointer(workdir / phases.TRAIN) as checkpointer:
      if host_state:
        state = phases.initial_state(config, learner, workdir, phase)
        checkpointer.save((checkpointer.latest_step() or 0) + 1, state, host_state | {"explained_variance": []})
        checkpointer.wait()
      start = phases.restore_or_begin(config, learner, workdir, phase, checkpointer)
    settled = phases.settle_objective(learner, critic_pretrained=start.critic_pretrained)
    return settled.config.algorithm.whiten_advantages

  assert settled() is cold
  with Checkpointer(workdir / phases.VALUE_PRETRAINING) as checkpointer:
    checkpointer.save(2, phases.initial_state(config, learner, workdir, phases.value_pretraining(config)))
  assert settled() is pretrained
  assert settled(rollouts=[], critic_pretrained=False) is cold
  assert settled(rollouts=[], critic_pretrained=True) is pretrained
  assert settled(rollouts=[]) is cold
