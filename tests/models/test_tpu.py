"""The gradient of a sharded MoE policy, all kernels included, compiles for a TPU topology, without a TPU."""

from __future__ import annotations

from toys.tpu_process import answer_of, needs_libtpu

PROGRAM = """
import json, re
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from sao_jax.config import ModelConfig
from sao_jax.models.attention.grouped import packed_attend
from sao_jax.models.attention.shards import query_order
from sao_jax.models.attention.splash import splash_shard
from sao_jax.models.policy import make_policy_apply
from sao_jax.models.transformer import param_specs, trunk
from sao_jax.parallel.mesh import AXES
from sao_jax.parallel.params import abstract_params
from sao_jax.parallel.layout import Layout
from sao_jax.pod import collectives, parse
from sao_jax.types import TrajectoryBatch

topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4")
devices = np.array(topology.devices).reshape(1, 2, 2, 2, 2)
layout = Layout(Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 5))
config = ModelConfig(
  vocab_size=512, num_layers=1, d_model=256, head_dim=64, num_experts=8, d_ff_expert=512, d_ff_shared=256,
  dtype="bfloat16", param_dtype="bfloat16", remat="dots")
specs = param_specs(config)
place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
params = jax.tree.map(place, abstract_params(specs), layout.param_shardings(specs))
rows = layout.sharding("batch", "sequence")
field = lambda dtype: jax.ShapeDtypeStruct((16, 640), dtype, sharding=rows)
ids, number, flag = field(jnp.int32), field(jnp.float32), field(jnp.bool_)
batch = TrajectoryBatch(ids, ids, ids, ids, flag, flag, number, ids, number, flag)
policy_apply = make_policy_apply(config, layout=layout)

def loss(params, batch):
  return jnp.sum(policy_apply(params, batch).logprobs)

compiled = jax.jit(jax.grad(loss)).lower(params, batch).compile()
text = compiled.as_text()
kernels = text.count("tpu_custom_call")
attention = [line for line in text.splitlines() if "tpu_custom_call" in line and "splash" in line.split("=")[0]]
forward = sum("_fwd_" in line for line in attention)
square = [shape for shape in re.findall(r"\\w+\\[([\\d,]+)\\]", text) if shape.split(",").count("640") > 1]

sums = [each for each in collectives(parse(text), dict(layout.mesh.shape)) if each.kind == "all-reduce"]

one = NamedSharding(Mesh(devices[:, :1, :1, :1, :1], AXES), jax.sharding.PartitionSpec())

def flops(remat):
  small = ModelConfig(vocab_size=8, num_layers=1, d_model=128, num_heads=2, head_dim=64, d_ff=512, remat=remat)
  params = jax.tree.map(lambda leaf: place(leaf, one), abstract_params(param_specs(small)))
  rows = jnp.ones((2, 64), jnp.int32)
  value = lambda params: jnp.sum(jnp.square(trunk(params, small, rows, rows, attend=packed_attend(rows))[0]))
  return jax.jit(jax.grad(value)).lower(params).compile().cost_analysis()["flops"]

def temporaries():
  heads = lambda count: jax.ShapeDtypeStruct((1, 32768, count, 128), jnp.bfloat16, sharding=one)
  segments, order = jax.ShapeDtypeStruct((1, 32768), jnp.int32, sharding=one), query_order(32768, 1)
  value = lambda q, k, v, segments: jnp.sum(splash_shard(q, k, v, segments, segments, order, 0, 1.0))
  shapes = heads(32), heads(2), heads(2), segments
  return jax.jit(jax.grad(value, (0, 1, 2))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

answer = {"forward": forward, "attention": len(attention), "square": square}
answer |= {"summed": max(each.array.bytes for each in sums if each.axes != "tensor")}
answer |= {"temporaries": temporaries()}
answer |= {"kernels": kernels, "bytes": compiled.memory_analysis().temp_size_in_bytes}
print(json.dumps(answer | {"remat": flops("full") / flops("none")}))
"""


@needs_libtpu
def test_moe_policy_compiles_for_a_tpu_topology():
  answer = answer_of(PROGRAM)
  assert answer["kernels"] >= 9  # three products, and two more for the gradient of each
  assert answer["bytes"] > 0
  assert answer["forward"] == 1  # what attention gave is kept
  assert answer["attention"] == 2  # and one kernel for all gradients
  assert answer["temporaries"] / 2**30 < 3  # of 16 blocks of keys, each with a gradient of 256 MiB for all queries
  assert answer["square"] == []
  # Of embeddings (256 KiB in fp32), head and experts no gradient is added up in full; of one projection of 64 KiB.
  assert answer["summed"] <= 2**16
  assert answer["remat"] > 1.15  # also where a loop over one layer dissolves, the backward pass computes it again
