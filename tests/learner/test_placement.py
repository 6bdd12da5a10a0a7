"""Placement `split`: some devices learn, the others sample."""

from __future__ import annotations

import jax
from toys import training_toy

from sao_jax.learner import placement, sampler_side
from sao_jax.sampler.engine import Engine
from sao_jax.training import loop


def test_placement_split_trains_on_some_devices_and_samples_on_others(tmp_path, monkeypatch):
  config = training_toy.replace(
    training_toy.get_config(),
    rollout={"placement": "split", "sampler_devices": 4},
    mesh={"data": 1, "fsdp": 2, "expert": 2},
    training={"steps": 2},
  )
  devices = placement.place(config)
  assert not set(devices.learner) & set(devices.sampler)
  engines = []

  def keep_engine(params, *arguments, **options):
    engines.append(Engine(params, *arguments, **options))
    return engines[-1]

  monkeypatch.setattr(sampler_side, "Engine", keep_engine)
  result = loop.train(config, tmp_path)
  assert int(result.state.policy_version) == 2
  for leaf in jax.tree.leaves(result.state):
    assert leaf.sharding.device_set == set(devices.learner)
  (engine,) = engines
  assert engine.version > 0  # what was published, not only what it began with
  for leaf in jax.tree.leaves((engine.params, engine._state)):
    assert leaf.sharding.device_set == set(devices.sampler)
