"""Placement: who learns, who samples and in which groups; the sampler's own mesh."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import pytest
from toys import training_toy

from sao_jax.config import MeshConfig
from sao_jax.configuration import config_tree
from sao_jax.errors import ConfigError
from sao_jax.learner import placement, sampler_side, setup
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


def pod(hosts, platform="cpu"):
  """Devices of hosts with 2 x 2 chips each, one behind the other along z."""
  device = lambda host, x, y: SimpleNamespace(
    id=4 * host + 2 * y + x, process_index=host, platform=platform, coords=(x, y, host), core_on_chip=0
  )
  return [device(host, x, y) for host in range(hosts) for y in range(2) for x in range(2)]


def divided(devices, process=0, **rollout):
  return placement.divide(training_toy.replace(training_toy.get_config(), rollout=rollout), devices, process)


def ids(devices):
  return [device.id for device in devices]


def test_on_shared_hosts_all_learn_and_each_samples():
  found = divided(pod(4), process=2)
  assert ids(found.learner) == list(range(16)) and len(found.groups) == 4
  assert ids(found.sampler) == [8, 9, 10, 11] and found.learns and found.samples
  pairs = divided(pod(4), process=2, hosts_per_sampler=2)
  assert [ids(group) for group in pairs.groups] == [list(range(8)), list(range(8, 16))]
  assert ids(pairs.sampler) == list(range(8, 16))
  with pytest.raises(ConfigError, match="4 hosts that sample do not divide into groups of 3") as error:
    divided(pod(4), hosts_per_sampler=3)
  assert error.value.field == "rollout.hosts_per_sampler"


SPLIT = {"placement": "split", "sampler_hosts": 4, "hosts_per_sampler": 2}


def test_the_first_host_of_a_sampler_leads_and_brings_the_data_for_all():
  found = [divided(pod(8), process, **SPLIT) for process in range(8)]
  assert [each.follows for each in found] == [False] * 5 + [True, False, True]
  assert [each.group for each in found] == [None] * 4 + [0, 0, 1, 1]
  assert [each.share.index for each in found] == [None] * 4 + [0, None, 1, None]
  assert {each.share.count for each in found} == {2}


@pytest.mark.parametrize("rollout", [{}, {"placement": "split", "sampler_devices": 1}])
def test_hosts_that_learn_cannot_hold_a_sampler_together(monkeypatch, rollout):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  config = training_toy.replace(training_toy.get_config(), rollout=rollout | {"hosts_per_sampler": 2})
  with pytest.raises(ConfigError, match="2 hosts that learn cannot hold one sampler together") as error:
    placement.place(config)
  assert error.value.field == "rollout.hosts_per_sampler"


def test_several_hosts_are_split_by_hosts():
  learning, sampling = (divided(pod(8, "tpu"), process, **SPLIT) for process in (3, 6))
  assert (learning.learns, learning.samples, learning.sampler) == (True, False, ())
  assert (sampling.learns, sampling.samples) == (False, True)
  assert ids(sampling.learner) == ids(learning.learner) == list(range(16))
  assert ids(sampling.sampler) == list(range(24, 32))
  assert ids(learning.groups[0]) == ids(sampling.groups[0]) == list(range(16, 24))


@pytest.mark.parametrize(
  ("changed", "field"),
  [
    ({"sampler_hosts": 0}, "sampler_devices"),
    ({"sampler_hosts": 8}, "sampler_hosts"),
    ({"sampler_hosts": 3}, "hosts_per_sampler"),
    ({"sampler_hosts": 5, "hosts_per_sampler": 5}, "sampler_hosts"),  # three hosts that learn are no group of five
  ],
)
def test_a_split_that_does_not_come_out_even_is_refused(changed, field):
  with pytest.raises(ConfigError) as error:
    divided(pod(8), **SPLIT | changed)
  assert error.value.field == f"rollout.{field}"


def test_every_host_may_divide_its_own_devices():
  found = divided(pod(2), process=1, placement="split", sampler_devices=2)
  assert ids(found.learner) == [0, 1, 4, 5] and [ids(group) for group in found.groups] == [[2, 3], [6, 7]]
  assert ids(found.sampler) == [6, 7] and found.learns


def test_learners_of_a_host_are_whole_groups_like_its_samplers():
  with pytest.raises(
    ConfigError, match="1 devices of a host learn, which are no whole number of groups of the 3"
  ) as error:
    divided(pod(2), placement="split", sampler_devices=3)
  assert error.value.field == "rollout.sampler_devices"
  assert ids(divided(pod(1), placement="split", sampler_devices=3).learner) == [0]  # in one process they may be any


def test_a_side_that_is_no_box_of_the_torus_is_refused():
  with pytest.raises(ConfigError, match="the 3 devices that learn are no box of the torus") as error:
    divided(pod(1, "tpu"), placement="split", sampler_devices=1)
  assert error.value.field == "rollout.sampler_devices"
  halves = divided(pod(1, "tpu"), placement="split", sampler_devices=2)
  assert ids(halves.learner) == [0, 1] and ids(halves.sampler) == [2, 3]


def test_the_sampler_has_a_mesh_of_its_own():
  config = training_toy.replace(training_toy.get_config(), mesh={"data": 1, "fsdp": 8})
  own = config_tree.replace(config, {"sampler.mesh.data": -1, "sampler.mesh.fsdp": 1, "sampler.mesh.expert": 2})
  assert own.sampler.mesh == MeshConfig(data=-1, fsdp=1, expert=2)
  learner = setup.make_learner(own)
  assert dict(learner.mesh.shape)["fsdp"] == 8
  copy = sampler_side.make_publisher(learner)(setup.init_policy_params(learner, 0))
  experts, attention = (copy["moe_layers"][group][name] for group, name in (("moe", "gate"), ("attention", "q")))
  assert dict(experts.sharding.mesh.shape) == {"data": 4, "fsdp": 1, "expert": 2, "tensor": 1, "context": 1}
  layers, number, *matrix = experts.shape
  assert experts.sharding.shard_shape(experts.shape) == (layers, number // 2, *matrix)
  assert attention.is_fully_replicated  # no token has to gather it


@pytest.mark.parametrize(
  ("mesh", "slots", "field", "problem"),
  [
    (MeshConfig(data=3, fsdp=1), 32, "sampler.mesh", "does not match 8 devices"),
    (MeshConfig(data=1, fsdp=1, tensor=8), 32, "sampler.mesh.tensor", "cannot split"),
    (MeshConfig(data=8, fsdp=1), 12, "sampler.num_slots", "12"),
  ],
)
def test_a_sampler_mesh_that_cannot_work_is_refused_before_anything_runs(mesh, slots, field, problem):
  config = training_toy.get_config()
  sampler = dataclasses.replace(config.sampler, mesh=mesh, num_slots=slots, decode_batch=min(slots, 32))
  with pytest.raises(ConfigError, match=problem) as error:
    setup.make_learner(dataclasses.replace(config, sampler=sampler))
  assert error.value.field == field
