"""The program of a cache in pages compiles for a TPU topology, without a TPU: in place, and with the kernel."""

from __future__ import annotations

from toys.tpu_process import answer_of, needs_libtpu

PROGRAM = """
import json, math, re
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from sao_jax.config import MeshConfig, ModelConfig, SamplerConfig
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import SAMPLER_RULES, Layout
from sao_jax.parallel.mesh import make_mesh
from sao_jax.sampler import page_steps
from sao_jax.sampler.cache_layout import make_programs
from sao_jax.sampler.sampling import SamplingRule
from sao_jax.sampler.state import state_shardings

topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1")
model = ModelConfig(
  vocab_size=4096, num_layers=6, d_model=512, num_heads=8, num_kv_heads=4, head_dim=128, num_experts=8,
  d_ff_expert=256, dtype="bfloat16", param_dtype="bfloat16")
slots, context = 8, 65536
config = SamplerConfig(
  num_slots=slots, context_length=context, decode_steps=8, cache_layout="pages", page_size=128, prefill_chunk=1024)
specs, answer = param_specs(model), {}
for name, sizes in {"expert": MeshConfig(fsdp=1, expert=4), "tensor": MeshConfig(fsdp=1, tensor=4)}.items():
  layout = Layout(make_mesh(sizes, list(topology.devices)), SAMPLER_RULES)
  programs = make_programs(model, config, layout)
  without, call = programs.idle_calls(prefixes=True)
  place = lambda shape, dtype, *axes: jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(*axes))
  params = jax.tree.map(lambda spec, at: jax.ShapeDtypeStruct(spec.shape, "bfloat16", sharding=at),
                        specs, layout.param_shardings(specs))
  state = jax.eval_shape(programs.empty_state)
  state = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state,
                       state_shardings(state, layout))
  host = lambda tree: jax.tree.map(lambda x: place(x.shape, x.dtype, "slots"), tree)
  key = jax.eval_shape(lambda: jax.random.key(0))
  lowered = page_steps.dispatch.lower(
    params, state, host(call.table), key, host(call.chosen), place((), jnp.int32), host(call.prompts), config=model,
    rule=SamplingRule(), max_steps=8, capacity=context, layout=layout)
  cache = math.prod(state.cache.kv.sharding.shard_shape(state.cache.kv.shape)) * 2
  compiled = lowered.compile()
  memory, text = compiled.memory_analysis(), compiled.as_text()
  names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
  moved = re.findall(rf"= (.*?) (?:{names})(?:-start)?\\(", text)
  sizes = [math.prod(map(int, shape.split(","))) * {"bf16": 2, "f32": 4, "s32": 4, "u32": 4}[dtype]
           for dtype, shape in re.findall(r"(bf16|f32|s32|u32)\\[([\\d,]+)\\]", " ".join(moved))]
  answer[name] = {
    "kernel": "ragged_paged_attention_kernel" in text, "cache": cache, "temporaries": memory.temp_size_in_bytes,
    "aliased": memory.alias_size_in_bytes, "moved": max(sizes)}
print(json.dumps(answer))
"""


@needs_libtpu
def test_no_program_copies_or_moves_the_cache():
  for name, program in answer_of(PROGRAM).items():
    assert program["kernel"], name
    assert program["aliased"] >= program["cache"], name
    assert program["moved"] < 8 * 2**20, (name, program["moved"])
    assert program["temporaries"] <= 0.05 * program["cache"], (name, program)
