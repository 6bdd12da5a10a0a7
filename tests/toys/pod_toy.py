"""Tiny runs whose programs satisfy the kernels of a TPU, one for each kind of model, and what compiles them."""

from __future__ import annotations

import dataclasses

from sao_jax.config import AlgorithmConfig, MeshConfig, ModelConfig, RolloutConfig, RunConfig, SamplerConfig
from sao_jax.environments.calculator import Calculator
from toys.tpu_process import answer_of

LENGTH = 256  # of rows and contexts
DENSE = ModelConfig(
  vocab_size=512,
  num_layers=2,
  d_model=256,
  num_heads=2,
  num_kv_heads=2,
  head_dim=128,
  d_ff=256,
  dtype="bfloat16",
  remat="full",
)
# The layers of one kind become one loop: more of them compile no longer.
EXPERTS = {"num_experts": 8, "d_ff_expert": 128, "d_ff": 128}
LATENT = EXPERTS | {
  "qk_norm": False,
  "kv_lora_rank": 128,
  "q_lora_rank": 128,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "index_topk": 64,
  "index_num_heads": 2,
  "index_head_dim": 128,
  "router": "sigmoid",
  "d_ff_shared": 128,
}


def tiny_run(model: ModelConfig, mesh: MeshConfig, **sampler: int) -> RunConfig:
  """A run of few, short rows."""
  return RunConfig(
    name="tiny",
    environment=Calculator(),
    model=model,
    algorithm=AlgorithmConfig(logprob_chunk=128),
    mesh=mesh,
    sampler=SamplerConfig(
      **({"num_slots": 16, "context_length": LENGTH, "prefill_chunk": 128, "cache_dtype": "bfloat16"} | sampler)
    ),
    rollout=RolloutConfig(batch_size=16, row_lengths=(LENGTH,), row_counts=(16,), max_turns=2, max_tokens=64),
  )


RUNS = {
  "dense": tiny_run(DENSE, MeshConfig(fsdp=4, tensor=2)),
  "experts": tiny_run(
    dataclasses.replace(DENSE, **EXPERTS, remat="attention"), MeshConfig(fsdp=2, expert=2, context=2)
  ),
  # So many pairs that they are laid out in buffers.
  "many": tiny_run(dataclasses.replace(DENSE, **EXPERTS, num_experts_per_token=4), MeshConfig(fsdp=4, expert=4)),
  "latent": tiny_run(dataclasses.replace(DENSE, **LATENT), MeshConfig(fsdp=2, expert=2, context=2)),
}


def compile_in_a_process(run: str, topology: str, programs: tuple[str, ...]) -> list[dict]:
  """Figures of the programs of one of `RUNS`, all compiled in one process of their own.

  Added are "arrays", all shapes with their operations, and "attention kernels", the name and operation of each that is
  none of experts.
  """
  code = (
    "import json\n"
    "from toys.pod_toy import RUNS, inspected\n"
    f"print(json.dumps([inspected(RUNS[{run!r}], name, {topology!r}) for name in {programs!r}]))\n"
  )
  return answer_of(code, timeout=550)


def inspected(run: RunConfig, program: str, topology: str) -> dict:
  """The figures of a program and what it consists of; in a process for it."""
  from sao_jax.pod import measure
  from sao_jax.pod.compilations import compile_here
  from sao_jax.pod.traffic import largest_arrays

  read, parse = [], measure.parse
  measure.parse = lambda *args, **kwargs: read.append(parse(*args, **kwargs)) or read[-1]
  figures = compile_here(run, program, topology, None)
  measure.parse = parse
  kernels = [each for each, _ in read[0].instructions(fused=True) if each.target == "tpu_custom_call"]
  return figures | {
    "arrays": [(each.array.shape, each.op_name) for each in largest_arrays(read[0], count=10**6)],
    "attention kernels": [(each.name, each.op_name) for each in kernels if "gmm" not in each.name],
  }
