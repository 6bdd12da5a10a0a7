"""The names that the parts of a train step have in a profile."""

from __future__ import annotations

import re

import jax
import pytest
from toys import training_toy
from toys.trajectories import make_trajectories

from sao_jax.learner import setup
from sao_jax.learner.batches import packed_batch

OF_THE_STEP = {"critic", "policy", "values", "advantages", "optimizer"}
OF_A_MODEL = {"embed", "attention", "mlp", "moe", "router", "experts", "logprobs"}
SPARSE = {"kv_lora_rank": 12, "q_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 6}
SPARSE |= {"index_topk": 5, "index_num_heads": 8, "index_head_dim": 9, "qk_norm": False}


@pytest.mark.parametrize(("attention", "more"), [({}, set()), (SPARSE, {"indexer", "choose"})])
def test_every_block_of_a_train_step_has_its_name(attention, more):
  model = {"num_experts": 4, "d_ff_shared": 16, "num_layers": 2, "num_dense_layers": 1, "num_kv_heads": 4} | attention
  config = training_toy.replace(
    training_toy.get_config(),
    model={"num_heads": 4} | model,
    algorithm={"advantage_values": "post"},
    rollout={"row_lengths": (16, 32), "row_counts": (8, 16)},
  )
  learner = setup.make_learner(config, tuple(jax.devices()[:1]))
  rows = packed_batch(learner, make_trajectories()[:4]).rows
  program = setup.make_step(learner).lower(setup.abstract_state(learner), rows).as_text(debug_info=True)

  # As in "jit(train_step)/policy/transpose(jvp(attention))/dot_general".
  paths = set(re.findall(r'"jit\(train_step\)/([^"]*)"', program))
  assert {name for path in paths for name in re.findall(r"\w+", path)} >= OF_THE_STEP | OF_A_MODEL | more
  assert any(path.startswith("policy/optimizer/") for path in paths)
