"""What the samplers of two real processes get from a learner over both."""

from __future__ import annotations

import pytest
from toys.processes import run_together

PROGRAM = """
import jax, numpy as np
from sao_jax.parallel.process import initialize_processes, leave_processes
initialize_processes()

from sao_jax.config import LoRAConfig, MeshConfig
from sao_jax.learner import make_learner, make_publisher, setup
from sao_jax.models.lora import merge_lora
from sao_jax.parallel import publish_groups
from sao_jax.parallel.feeding import everywhere
from sao_jax.parallel.params import init_params
from toys import training_toy

publish_groups.PIECE = 1024  # bytes: experts go in two pieces
plain, adapted = LoRAConfig(), LoRAConfig(rank=2, alpha=8.0)
spread = {"mesh": {"data": 1, "fsdp": 4, "context": 2}, "sampler": {"mesh": MeshConfig(data=-1, fsdp=1, expert=2)}}
single = {"mesh": {"data": 3, "fsdp": 2}, "rollout": {"placement": "split", "sampler_devices": 1}}
apart = {"mesh": {"data": 2, "fsdp": 2}, "rollout": {"placement": "split", "sampler_hosts": 1}}
for sections, lora in ((spread, plain), (single, adapted), (apart, adapted)):
  model = {"num_layers": 2, "num_experts": 4, "dtype": "bfloat16", "lora": lora}
  learner = make_learner(training_toy.replace(training_toy.get_config(), model=model, **sections))
  params = setup.init_policy_params(learner, 0)
  if lora.rank and learner.learns:
    params["lora"]["b"] = jax.tree.map(lambda leaf: leaf + 0.5, params["lora"]["b"])
  copy, devices = make_publisher(learner)(params), learner.devices.sampler
  if not devices:
    assert sections == apart and jax.process_index() == 0 and copy == {}
    continue

  # Who does not learn knows what the learner has begun with.
  if learner.learns:
    whole = everywhere(params, learner.layout.sharding())
  else:
    whole = jax.jit(lambda key: init_params(learner.policy.specs, key))(jax.random.key(0))
    whole["lora"]["b"] = jax.tree.map(lambda leaf: leaf + 0.5, whole["lora"]["b"])
  rounding = 0.01 if lora.rank else 0.0  # of sums in another order
  for (path, leaf), expected in zip(
    jax.tree_util.tree_leaves_with_path(copy), jax.tree.leaves(merge_lora(whole)), strict=True
  ):
    expected = np.asarray(expected).astype(leaf.dtype).astype(np.float32)
    np.testing.assert_allclose(np.asarray(leaf).astype(np.float32), expected, rtol=rounding, err_msg=str(path))
    assert leaf.sharding.device_set == set(devices), path
  experts = copy["moe_layers"]["moe"]["gate"]
  assert experts.dtype == "bfloat16"
  assert experts.addressable_shards[0].data.shape[1] == (2 if sections == spread else 4)
  assert sections != single or isinstance(experts.sharding, jax.sharding.SingleDeviceSharding)  # an engine without mesh
print("process", jax.process_index(), "has seen all")
leave_processes()
"""


@pytest.mark.timeout(600)
def test_every_process_gets_the_policy_on_its_samplers_devices():
  """Also with LoRA, whose factors are merged on the way, and where one process learns and the other samples."""
  ended = run_together(["-c", PROGRAM], seconds=550)
  assert all("has seen all" in each.stdout for each in ended)
