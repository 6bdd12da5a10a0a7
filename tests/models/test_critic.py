"""A critic from a policy of each family: its head, and the explicit list of what is frozen."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from toys import hf_toy
from toys.glm5_toy import TINY as GLM5

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families import family_of_model
from sao_jax.models import critic
from sao_jax.models.attention.grouped import GROUPED
from sao_jax.models.critic import critic_params_from_policy, critic_specs, frozen_critic_paths
from sao_jax.parallel.params import path_names

MATRICES = ["q", "k", "v", "o"]
NORMS = ["q_norm", "k_norm"]
BIASES = ["q_bias", "k_bias", "v_bias"]
LATENT = ["q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "o"]
AIR = dataclasses.replace(hf_toy.GLM, qk_norm=False)
QWEN3_MOE = ModelConfig(num_experts=4)
FROZEN = {  # layers and leaves of attention, per family
  "qwen3": (hf_toy.DENSE, ["dense_layers"], MATRICES + NORMS),
  "qwen3_moe": (QWEN3_MOE, ["moe_layers"], MATRICES + NORMS),
  "glm4_moe": (hf_toy.GLM, ["dense_layers", "moe_layers"], MATRICES + NORMS + BIASES),
  "glm4_moe without q/k norm": (AIR, ["dense_layers", "moe_layers"], MATRICES + BIASES),
  "glm_moe_dsa": (GLM5, ["dense_layers", "moe_layers"], LATENT),
}
CORRECTION = {"moe_layers/moe/correction_bias"}
NO_GRADIENT = {  # frozen whatever the configuration says, per family
  "glm4_moe": CORRECTION,
  "glm_moe_dsa": CORRECTION | {f"indexer_layers/{leaf}" for leaf in ("q", "k", "k_norm", "k_norm_bias", "weights")},
}


@pytest.mark.parametrize("name", FROZEN)
def test_what_is_frozen(name):
  """All of the attention modules, biases included, and nothing else; more by configuration."""
  config, layers, leaves = FROZEN[name]
  family = name.split()[0]
  assert family_of_model(config).model_type == family
  expected = {f"{layer}/attention/{leaf}" for layer in layers for leaf in leaves}
  fixed = NO_GRADIENT.get(family, set())
  assert frozen_critic_paths(config) == expected | fixed
  declared = set(path_names(critic_specs(config)))
  assert expected == {path for path in declared if "/attention/" in path}
  assert fixed == {path for path in declared if path.startswith("indexer") or path.endswith("correction_bias")}
  assert frozen_critic_paths(config, attention=False) == fixed  # in value pretraining too
  router = frozen_critic_paths(config, attention=False, router=True) - fixed
  assert router == {path for path in declared if path.endswith("moe/router")}
  assert bool(router) == bool(config.num_experts)


def test_a_parameter_that_no_list_names_is_noticed(monkeypatch):
  names = tuple(name for name in GROUPED.names if name != "k_bias")
  monkeypatch.setattr(critic, "attention_kind", lambda config: dataclasses.replace(GROUPED, names=names))
  assert frozen_critic_paths(hf_toy.DENSE)
  with pytest.raises(ValueError, match="dense_layers/attention/k_bias"):
    frozen_critic_paths(hf_toy.GLM)


@pytest.mark.parametrize("initializer", ["zeros", "normal"])
def test_the_head(initializer):
  """Zeros, or N(0, initializer_range) that depends on the key; the trunk is the policy's."""
  config = dataclasses.replace(hf_toy.DENSE, d_model=512, num_layers=1, initializer_range=0.05)
  policy = hf_toy.random_params(config)
  make = lambda seed: critic_params_from_policy(policy, config, 4, initializer, jax.random.key(seed))
  first, second = make(0), make(1)
  for name in ("embed", "final_norm", "dense_layers"):
    jax.tree.map(np.testing.assert_array_equal, first[name], policy[name])
  heads = [np.asarray(params["value_head"]) for params in (first, second)]
  if initializer == "zeros":
    assert not np.any(heads)
  else:
    assert heads[0].std() == pytest.approx(0.05, rel=0.1) and abs(heads[0].mean()) < 0.005
    assert np.any(heads[0] != heads[1])
