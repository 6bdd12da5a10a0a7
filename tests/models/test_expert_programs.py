"""Programs of experts and vocabulary for a TPU, compiled without one: what travels, and what is copied."""

from __future__ import annotations

import pytest
from toys.tpu_process import answer_of, needs_libtpu

PROGRAM = """
import json
import jax, jax.numpy as jnp
from jax.experimental import topologies
from sao_jax.config import MeshConfig, ModelConfig
from sao_jax.models.moe import moe_feed_forward, set_experts_apart
from sao_jax.models.vocabulary_shards import sharded_embedding, sharded_logprobs
from sao_jax.parallel.layout import AxisRules, Layout
from sao_jax.parallel.mesh import make_mesh
from sao_jax.pod import collectives, parse

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x2").devices
config = ModelConfig(num_experts=32, num_experts_per_token=4)
axes = {"router": (None, None), "gate": ("expert", "expert_embed", "mlp"), "up": ("expert", "expert_embed", "mlp"),
        "down": ("expert", "mlp", "expert_embed")}

def abstract(layout, dtype, width, inner, *front):
  shapes = {"router": (width, 32), "gate": (32, width, inner), "up": (32, width, inner), "down": (32, inner, width)}
  place = lambda name: layout.sharding(*([None] * len(front)), *axes[name])
  return {name: jax.ShapeDtypeStruct((*front, *shape), dtype, sharding=place(name)) for name, shape in shapes.items()}

def tokens(layout, length, width):
  return jax.ShapeDtypeStruct((8, length, width), jnp.bfloat16, sharding=layout.sharding("batch", "sequence", None))

def training(mesh):
  layout = Layout(make_mesh(mesh, devices))
  value = lambda params, x: jnp.sum(moe_feed_forward(params, x, config, layout)[0].astype(jnp.float32) ** 2)
  params, x = abstract(layout, jnp.float32, 256, 128), tokens(layout, 512, 256)
  places = jax.tree.map(lambda leaf: leaf.sharding, (params, x))
  gradient = jax.jit(jax.grad(value, argnums=(0, 1)), out_shardings=places)
  program = parse(gradient.lower(params, x).compile().as_text())
  found = collectives(program, layout.mesh.shape)
  found = [(each.kind, each.axes, each.array.dtype, each.array.bytes) for each in found]
  rows = max(array.shape[0] for each, _ in program.instructions(fused=False) for array in each.arrays
             if len(array.shape) == 2 and array.shape[1] in (128, 256))
  return {"collectives": found, "rows": rows}

def decoding():
  layout = Layout(make_mesh(MeshConfig(data=4, fsdp=1, expert=2), devices), AxisRules())
  def step(params, x):
    others, experts = set_experts_apart({"moe": params}, x.dtype, layout)
    def layer(x, inputs):
      own, index = inputs
      return moe_feed_forward(own["moe"] | experts, x, config, layout, layer=index)[0], None
    return jax.lax.scan(layer, x, (others, jnp.arange(6)))[0]
  operands = abstract(layout, jnp.bfloat16, 1024, 512, 6), tokens(layout, 1, 1024)
  program = parse(jax.jit(step).lower(*operands).compile().as_text())
  free = ("parameter", "tuple", "get-tuple-element", "while", "bitcast")
  made = [each for each, _ in program.instructions(fused=False) if each.opcode not in free]
  kernels = [each for each in made if each.target == "tpu_custom_call"]
  return {"largest": max(each.bytes for each in made), "kernels": len(kernels)}

def vocabulary():
  plane = topologies.get_topology_desc(platform="tpu", topology_name="v5p:4x4x4").devices
  layout = Layout(make_mesh(MeshConfig(fsdp=16, context=4), plane))
  def value(embed, head, ids):
    hidden = sharded_embedding(layout, "bfloat16", embed, ids)
    return jnp.sum(sharded_logprobs(layout, 1.0, 128, head, hidden, ids)[0])
  place = lambda shape, dtype, *axes: jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(*axes))
  embed = place((1187 * 8, 512), jnp.float32, "vocab", "embed")
  head = place((512, 1187 * 8), jnp.float32, "embed", "vocab")
  gradient = jax.jit(jax.grad(value, argnums=(0, 1)), out_shardings=(embed.sharding, head.sharding))
  text = gradient.lower(embed, head, place((16, 512), jnp.int32, "batch", "sequence")).compile().as_text()
  return [(each.kind, each.axes, each.array.bytes) for each in collectives(parse(text), layout.mesh.shape)]

print(json.dumps({"vocabulary": vocabulary(), "fsdp": training(MeshConfig(fsdp=8)),
                  "fsdp x expert": training(MeshConfig(fsdp=4, expert=2)),
                  "expert": training(MeshConfig(fsdp=1, expert=8)),
                  "decoding": decoding()}))
"""
MIB = 2**20

pytestmark = needs_libtpu


@pytest.fixture(scope="module")
def programs():
  return answer_of(PROGRAM)


@pytest.mark.parametrize("mesh", ["fsdp", "fsdp x expert"])
def test_weights_are_gathered_in_bf16_and_their_gradients_scattered_in_fp32(programs, mesh):
  """Also over all chips of a torus, where one gather would be a sum; a chip's matrices are 2 or 1 MiB in bf16."""
  found = programs[mesh]["collectives"]
  weight = 2 * MIB if mesh == "fsdp" else MIB
  assert not [each for each in found if "all-reduce" in each[0] and each[3] >= MIB // 4]
  gathered = [each for each in found if each[0] == "all-gather" and each[3] == weight]
  assert gathered and all(axes == "fsdp" and dtype == "bf16" for _, axes, dtype, _ in gathered)
  scattered = [each for each in found if each[0] == "reduce-scatter" and each[1] == "fsdp" and each[3] >= MIB // 4]
  assert scattered and all(dtype == "f32" for _, _, dtype, _ in scattered)


def test_no_weight_moves_over_expert_and_no_buffer_holds_more_than_its_share(programs):
  """Two devices share 1024 tokens (0.5 MiB) with 4096 pairs, of which one buffer holds 1.5 times the half."""
  found = programs["fsdp x expert"]["collectives"]
  assert max(size for _, axes, _, size in found if "expert" in axes) <= MIB // 2
  assert programs["fsdp x expert"]["rows"] == 3072
  assert programs["fsdp"]["rows"] == 2048  # without other experts' pairs there is nothing to leave out


def test_tokens_travel_to_many_experts_and_are_not_gathered(programs):
  """A device has 512 tokens with four experts each, of which eight devices hold four: 2048 pairs, 3072 rows."""
  found = programs["expert"]["collectives"]
  assert [kind for kind, axes, dtype, _ in found if axes == "expert" and dtype == "bf16"] == ["ragged-all-to-all"] * 5
  assert not [size for kind, _, _, size in found if kind == "all-gather" and size > 1024]
  assert not [size for kind, _, _, size in found if kind == "reduce-scatter" and size > 1024]
  assert programs["expert"]["rows"] == 3072


def test_decoding_copies_no_experts(programs):
  """Three products of a layer, each reading its matrices (16 MiB) where they stand among those of six layers."""
  assert programs["decoding"]["kernels"] == 3
  assert programs["decoding"]["largest"] < MIB


def test_gradients_of_a_vocabulary_are_scattered_whatever_its_size(programs):
  """1187 lines of 8 tokens have no smaller factor: of pieces of unequal size, a TPU adds up all in full."""
  found = [(kind, axes) for kind, axes, size in programs["vocabulary"] if size >= MIB // 4]
  kinds = ("all-gather", "reduce-scatter")
  assert sorted(found) == [(kind, axes) for kind in kinds for axes in ("context", "fsdp") for _ in range(2)]
