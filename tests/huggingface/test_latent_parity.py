"""Latent and sparse attention against the layer of transformers with the same weights."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import latent_toy as toy

torch = pytest.importorskip("torch", reason="needs the extra `parity`")
pytest.importorskip("transformers", minversion="5.24", reason="needs the extra `parity`")


def transformers_layer(config, params, indexer):
  """`GlmMoeDsaAttention` with our weights."""
  from transformers import GlmMoeDsaConfig
  from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

  theirs = GlmMoeDsaConfig(
    hidden_size=config.d_model,
    num_hidden_layers=1,
    num_attention_heads=config.num_heads,
    num_key_value_heads=config.num_heads,
    q_lora_rank=config.q_lora_rank,
    kv_lora_rank=config.kv_lora_rank,
    qk_nope_head_dim=config.qk_nope_head_dim,
    qk_rope_head_dim=config.qk_rope_head_dim,
    v_head_dim=config.v_head_dim,
    index_topk=config.index_topk,
    index_n_heads=config.index_num_heads,
    index_head_dim=config.index_head_dim,
    rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    attn_implementation="eager",
  )
  matrix = lambda x: np.asarray(x).reshape(x.shape[0], -1).T  # [in, ...] -> [out, in]
  weights = {
    "q_a_proj.weight": matrix(params["q_a"]),
    "q_a_layernorm.weight": params["q_a_norm"],
    "q_b_proj.weight": matrix(params["q_b"]),
    "kv_a_proj_with_mqa.weight": matrix(params["kv_a"]),
    "kv_a_layernorm.weight": params["kv_a_norm"],
    "kv_b_proj.weight": matrix(params["kv_b"]),
    "o_proj.weight": np.asarray(params["o"]).reshape(-1, config.d_model).T,
    "indexer.wq_b.weight": matrix(indexer["q"][0]),
    "indexer.wk.weight": matrix(indexer["k"][0]),
    "indexer.k_norm.weight": indexer["k_norm"][0],
    "indexer.k_norm.bias": indexer["k_norm_bias"][0],
    "indexer.weights_proj.weight": matrix(indexer["weights"][0]),
  }
  layer = GlmMoeDsaAttention(theirs, 0).eval()
  layer.load_state_dict({name: torch.tensor(np.array(value)) for name, value in weights.items()}, strict=True)
  return layer


def their_output(layer, config, x, positions, mask):
  """Their output and the positions that their indexer chose, as a mask [B, T, T]."""
  frequencies = config.rope_theta ** -(np.arange(0, config.qk_rope_head_dim, 2) / config.qk_rope_head_dim)
  angles = np.asarray(positions)[..., None] * np.concatenate([frequencies, frequencies])
  table = tuple(torch.tensor(f(angles), dtype=torch.float32) for f in (np.cos, np.sin))
  additive = torch.tensor(np.where(mask, 0.0, np.finfo(np.float32).min)[:, None], dtype=torch.float32)
  with torch.no_grad():
    out, _, chosen = layer(torch.tensor(np.asarray(x)), table, additive)
  selection = np.zeros(mask.shape, bool)
  np.put_along_axis(selection, chosen.numpy(), True, axis=-1)
  return out.numpy(), selection & mask


SEGMENTS = {
  "alone": [1] * 13,
  "right padding": [1] * 10 + [0] * 3,
  "left padding": [0] * 4 + [1] * 9,
  "packed": [1] * 2 + [2] * 8 + [3] * 3,
}


@pytest.mark.parametrize("index_topk", [5, 13], ids=["chosen positions", "all positions"])
def test_a_layer_gives_the_outputs_and_choices_of_transformers(index_topk):
  config = dataclasses.replace(toy.CONFIG, index_topk=index_topk)
  params, indexer = toy.layer_params(config)
  segments = np.asarray(list(SEGMENTS.values()), np.int32)
  starts = np.diff(segments, axis=1, prepend=-1) != 0
  index = np.arange(segments.shape[1])
  positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
  x = toy.hidden_states(rows=len(segments))
  mask = (segments[:, :, None] == segments[:, None]) & (index[:, None] >= index)

  expected, their_choice = their_output(transformers_layer(config, params, indexer), config, x, positions, mask)
  run = jax.jit(lambda *arrays: toy.run_layer(params, indexer, *arrays, config))
  out, choice = run(x, jnp.asarray(positions, jnp.int32), jnp.asarray(segments))
  real = segments > 0
  assert np.std(expected[real]) > 0.1
  np.testing.assert_array_equal(np.asarray(choice)[real], their_choice[real])
  np.testing.assert_allclose(np.asarray(out)[real], expected[real], atol=2e-5)
