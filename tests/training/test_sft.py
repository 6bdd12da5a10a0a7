"""The imitation phase: stopped by Ctrl-C and run again, it is the run that nobody stopped, bit for bit."""

from __future__ import annotations

import dataclasses
import signal

import jax
import numpy as np
from toys import training_toy

from sao_jax.learner import placement
from sao_jax.report.metrics import read_metrics
from sao_jax.training import phases, sft


def test_ctrl_c_and_the_same_command_again_leave_no_trace(tmp_path, monkeypatch):
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
  config = training_toy.replace(training_toy.get_config(), sft={"steps": 4}, training={"checkpoint_every": 1000})
  expected = jax.device_get(sft.sft(config, tmp_path / "expected"))
  pack, packed = sft.agreed_batch, []

  def pack_and_interrupt(learner, trajectories, look):
    if trajectories is None:  # it was asked to stop
      return pack(learner, trajectories, look)
    packed.append([trajectory.token_ids.tolist() for trajectory in trajectories])
    if len(packed) == 2:
      signal.raise_signal(signal.SIGINT)
    return pack(learner, trajectories, look)

  monkeypatch.setattr(sft, "agreed_batch", pack_and_interrupt)
  workdir = tmp_path / "interrupted"
  halfway = jax.device_get(sft.sft(config, workdir))
  assert phases.latest_step(workdir / phases.SFT) == 2
  resumed = jax.device_get(sft.sft(config, workdir))
  assert phases.latest_step(workdir / phases.SFT) == 4
  assert len(packed) == 4 and all(batch not in packed[:2] for batch in packed[2:])
  assert [line["step"] for line in read_metrics(workdir, phases.SFT)] == [1, 2, 3, 4]
  jax.tree.map(np.testing.assert_array_equal, resumed, expected)
  assert any((a != b).any() for a, b in zip(jax.tree.leaves(halfway), jax.tree.leaves(expected)))


def test_imitation_leaves_the_biases_of_routers_alone(tmp_path, monkeypatch):
  """They follow the load in reinforcement learning only."""
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
  config = training_toy.replace(
    training_toy.get_config(), sft={"steps": 2}, model={"router": "sigmoid"}, algorithm={"router_bias_update": 0.125}
  )
  params = jax.device_get(sft.sft(config, tmp_path))
  assert not params["moe_layers"]["moe"]["correction_bias"].any()


@dataclasses.dataclass(frozen=True)
class PaidParity(training_toy.Parity):
  """The toy environment, whose experts earn something in each of their two turns."""

  def demonstration(self, prompt, tokenizer, rng):
    return dataclasses.replace(super().demonstration(prompt, tokenizer, rng), turn_rewards=np.array([0.25, 0.75]))


def test_rewards_per_turn_of_a_demonstration_stand_on_its_turns():
  config = dataclasses.replace(training_toy.get_config(), environment=PaidParity())
  for trajectory in sft.Demonstrations(config).batch():
    assert trajectory.token_rewards.tolist() == [0, 0, 0, 0.25, 0, 0, 0, 0.75] and trajectory.reward == 1.0
