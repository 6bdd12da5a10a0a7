"""GLM-5.2 (750B, 40B of them active), policy and critic, on 512 v5p chips: 128 trajectories x 131,072 tokens.

    python -m launch.compile_pod --config=configs/glm_5_2.py --topology=v5p:8x8x8

tells what each chip holds and what bounds a step.

The mesh: each axis is one axis of the torus. A row lies on eight chips (context=8), whose latents are small enough to
be gathered; experts live on eight others (expert=8), to which tokens travel, and weights are split over all three.
Two micro-batches of 64 rows leave 16,384 tokens to a chip at a time.

A copy of the policy for sampling takes 64 chips, 16 hosts, which cannot learn besides: a run has them apart from those
512. Experts lie on sixteen times four of them, their width and the heads split over four (expert=16, tensor=4), or what
is no expert's would take 35 GB of each chip; the next version of the weights fits beside 32 contexts.
"""

from __future__ import annotations

import dataclasses

from configs import qwen3_30b_a3b
from sao_jax.config import AlgorithmConfig, MeshConfig, RunConfig
from sao_jax.huggingface.published import PUBLISHED


def get_config() -> RunConfig:
  """The model, its mesh and its sampler; everything else as for Qwen3-30B-A3B."""
  base = qwen3_30b_a3b.get_config()
  return dataclasses.replace(
    base,
    name="glm_5_2",
    model=dataclasses.replace(PUBLISHED["GLM-5.2"].model, remat="full"),
    algorithm=AlgorithmConfig(micro_batches=2),
    mesh=MeshConfig(data=1, fsdp=8, expert=8, context=8),
    sampler=dataclasses.replace(base.sampler, num_slots=32, mesh=MeshConfig(fsdp=1, expert=16, tensor=4)),
    rollout=dataclasses.replace(base.rollout, placement="split", sampler_hosts=16, hosts_per_sampler=16),
    evaluation=dataclasses.replace(base.evaluation, sampler="shared"),
  )
