"""Publishing over two real processes: every group of samplers gets the learner's parameters, in its own layout."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from toys.processes import run_together

from sao_jax.parallel import publish_groups

PROGRAM = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from sao_jax.parallel.process import initialize_processes
initialize_processes()
from sao_jax.parallel import publish_groups
from sao_jax.parallel.publish import make_publish

here, devices = jax.process_index(), np.array(jax.devices())
publish_groups.PIECE = 512  # bytes: "layers" goes in two pieces
values = {"w": np.arange(128, dtype=np.float32).reshape(16, 8), "n": np.arange(4, dtype=np.int32)}
values["layers"] = np.arange(512, dtype=np.int32).reshape(4, 8, 16) % 251
learnt = {"w": P("fsdp", "tensor"), "n": P(), "layers": P(None, "fsdp", "tensor")}
sampled = {"w": P(None, "tensor"), "n": P(), "layers": P(None, "tensor")}
doubled = lambda params: params | {"w": 2 * params["w"]}
shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in values.items()}
shapes["w"] = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)
mesh_of = lambda devices: Mesh(devices.reshape(-1, 2), ("fsdp", "tensor"))
place = lambda tree, mesh: jax.jit(
  lambda: jax.tree.map(jnp.asarray, tree), out_shardings={name: NamedSharding(mesh, learnt[name]) for name in learnt})()

def published(learners, groups, learns):
  target = {name: NamedSharding(groups[0], spec) for name, spec in sampled.items()}
  publish = make_publish(target, "bfloat16", prepare=doubled, groups=groups, shapes=shapes)
  for step in (1, 2):  # the second one finds everything compiled, and parameters that are still there
    params = place(values | {"w": step * values["w"]}, learners) if learns else None
    copy = publish(params)
    if params is not None:
      params["w"].block_until_ready()
  if copy is None:
    return None
  own = next(mesh for mesh in groups if mesh.devices.flat[0].process_index == here)
  assert copy["w"].sharding == NamedSharding(own, sampled["w"]) and copy["w"].dtype == jnp.bfloat16
  assert copy["w"].is_fully_addressable
  np.testing.assert_array_equal(np.asarray(copy["layers"]), values["layers"])
  return np.asarray(copy["w"], np.float32).tolist(), np.asarray(copy["n"]).tolist()

hosts = [devices[[device.process_index == index for device in devices]] for index in range(2)]
# The learner's mesh spans both, in an order that is nobody's; every host samples by itself.
answer = {"shared": published(mesh_of(devices[[5, 0, 3, 6, 1, 4, 7, 2]]), [mesh_of(own) for own in hosts], True)}
# Every host has learners and samplers of its own; among the former are groups like the latter.
learners, samplers = (np.concatenate([own[part] for own in hosts]) for part in (slice(2), slice(2, 4)))
answer["divided"] = published(mesh_of(learners[[2, 1, 0, 3]]), [mesh_of(own[2:]) for own in hosts], True)
# One host learns, the other samples.
answer["split"] = published(mesh_of(hosts[0]), [mesh_of(hosts[1])], here == 0)
roles = NamedSharding(publish_groups.stack([mesh_of(own) for own in hosts]), P("role"))
program = publish_groups.broadcast(roles)
text = program.lower(jax.ShapeDtypeStruct((2, 16, 8), jnp.float32, sharding=roles)).compile().as_text()
kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
answer["collectives"] = sum(text.count(f" {kind}{start}(") for kind in kinds for start in ("", "-start"))
print(json.dumps(answer))
"""


def test_every_group_gets_a_copy():
  first, second = (json.loads(done.stdout.splitlines()[-1]) for done in run_together(["-c", PROGRAM]))
  expected = [[[4.0 * (8 * row + column) for column in range(8)] for row in range(16)], [0, 1, 2, 3]]
  assert first["shared"] == second["shared"] == first["divided"] == second["divided"] == expected
  assert first["split"] is None and second["split"] == expected  # who only learns gets nothing
  assert first["collectives"] == 1  # entry 0 goes to all in one step


@pytest.mark.parametrize("pieces", [1, 3])
def test_no_device_gathers_what_its_group_splits(pieces):
  """Experts of two groups, from a learner that splits another dimension: nothing larger than a part of a piece."""
  devices, shape = np.array(jax.devices()[:8]), (6, 8, 64, 16)
  learner = NamedSharding(Mesh(devices.reshape(4, 2), ("fsdp", "context")), P(None, None, ("fsdp", "context")))
  groups = [Mesh(own, ("expert",)) for own in devices.reshape(2, 4)]
  target = NamedSharding(publish_groups.stack(groups), P(None, "expert"))
  leaf = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=learner)
  between = publish_groups.halfway(leaf, target)
  assert between.spec == P(None, "expert", "role", None)

  text = publish_groups.exchange(between, target, pieces).lower(leaf).compile().as_text()
  found = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* (all-gather|all-to-all|all-reduce)(?:-start)?\(", text)
  assert {kind for _, kind in found} == {"all-gather", "all-to-all"}
  largest = max(np.prod([int(size) for size in sizes.split(",")]) for sizes, _ in found)
  assert largest == np.prod(shape) // pieces // 4


def test_a_layout_that_does_not_divide_further_is_reached_at_once():
  devices = np.array(jax.devices()[:8])
  learner = NamedSharding(Mesh(devices[:1].reshape(1), ("fsdp",)), P())
  target = NamedSharding(publish_groups.stack([Mesh(own, ("expert",)) for own in devices.reshape(2, 4)]), P("expert"))
  whole = jax.ShapeDtypeStruct((4, 3), jnp.int32, sharding=learner)
  assert publish_groups.halfway(whole, target) == target  # no dimension is split
  odd = NamedSharding(Mesh(devices[:3], ("fsdp",)), P(None, "fsdp"))
  assert publish_groups.halfway(jax.ShapeDtypeStruct((4, 3), jnp.int32, sharding=odd), target) == target
