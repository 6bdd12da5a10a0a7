"""A whole train step on long rows: nothing in it grows with the square of their length."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from sao_jax.benchmarks.learning import full_batch
from sao_jax.benchmarks.scale import QUICK
from sao_jax.config import MeshConfig, ModelConfig, RolloutConfig, RunConfig
from sao_jax.learner import setup
from sao_jax.pod import arrays_quadratic_in, largest_arrays, parse

LENGTH = 1024  # far above every width of the models below
TINY = ModelConfig(vocab_size=32, num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=32)
EXPERTS = dataclasses.replace(TINY, num_experts=4, num_experts_per_token=2, d_ff_expert=16)
SPARSE = dataclasses.replace(
  TINY,
  qk_norm=False,
  kv_lora_rank=8,
  q_lora_rank=8,
  qk_nope_head_dim=8,
  qk_rope_head_dim=4,
  v_head_dim=8,
  index_topk=64,
  index_num_heads=2,
  index_head_dim=8,
)


@pytest.mark.parametrize("model", [EXPERTS, SPARSE], ids=["grouped with experts", "latent that chooses"])
def test_no_array_of_a_train_step_has_two_axes_of_a_rows_length(model):
  config = RunConfig(
    environment=None, model=model, mesh=MeshConfig(data=-1, fsdp=1), rollout=RolloutConfig(row_lengths=(LENGTH,))
  )
  learner = setup.make_learner(config, (jax.devices()[0],))
  batch = full_batch(dataclasses.replace(QUICK, rows=2, tokens=LENGTH), model.vocab_size)
  step = setup.make_step(learner).lower(setup.abstract_state(learner), batch)
  program = parse(step.compile().as_text())
  assert any(LENGTH in sized.array.shape for sized in largest_arrays(program))
  assert [str(sized.array) for sized in arrays_quadratic_in(program, LENGTH)] == []
