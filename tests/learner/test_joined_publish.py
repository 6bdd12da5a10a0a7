"""What the samplers of two real processes get from a learner over both."""

from __future__ import annotations

import pytest
from toys.processes import run_together

PROGRAM = """
import jax, numpy as np
from sao_jax.parallel.process import initialize_processes, leave_processes
initialize_processes()

from sao_jax.config import MeshConfig
from sao_jax.learner import make_learner, make_publisher, placement, setup
from sao_jax.parallel import publish_groups
from sao_jax.parallel.feeding import everywhere
from toys import training_toy

publish_groups.PIECE = 1024  # bytes: experts go in two pieces
model = {"num_layers": 2, "num_experts": 4, "dtype": "bfloat16"}
spread = {"mesh": {"data": 1, "fsdp": 4, "context": 2}, "sampler": {"mesh": MeshConfig(data=-1, fsdp=1, expert=2)}}
single = {"mesh": {"data": 3, "fsdp": 2}, "rollout": {"placement": "split", "sampler_devices": 1}}
for sections in (spread, single):
  config = training_toy.replace(training_toy.get_config(), model=model, **sections)
  learner, devices = make_learner(config), placement.place(config).sampler
  params = setup.init_policy_params(learner, 0)
  copy = make_publisher(learner)(params)
  whole = everywhere(params, learner.layout.sharding())

  for (path, leaf), expected in zip(jax.tree_util.tree_leaves_with_path(copy), jax.tree.leaves(whole), strict=True):
    np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected).astype(leaf.dtype), err_msg=str(path))
    assert leaf.sharding.device_set == set(devices), path
  experts = copy["moe_layers"]["moe"]["gate"]
  assert experts.dtype == "bfloat16"
  assert experts.addressable_shards[0].data.shape[1] == (4 if len(devices) == 1 else 2)
assert isinstance(experts.sharding, jax.sharding.SingleDeviceSharding)  # as an engine without a mesh wants it
leave_processes()
"""


@pytest.mark.timeout(600)
def test_every_process_gets_the_policy_on_its_samplers_devices():
  run_together(["-c", PROGRAM], seconds=550)
