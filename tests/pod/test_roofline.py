"""Model FLOPs against a second formula, the roofline by hand, chips and topologies."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest

from configs import calculator
from sao_jax.config import AlgorithmConfig, CriticConfig, LoRAConfig
from sao_jax.errors import ConfigError
from sao_jax.huggingface.published import PUBLISHED, active_params
from sao_jax.pod.chips import CHIPS, axis_bandwidth, chip_of, topology_of
from sao_jax.pod.matrix_products import Product
from sao_jax.pod.model_flops import step_flops, token_flops
from sao_jax.pod.roofline import roofline, utilisation


def published_run(name: str, **algorithm):
  return dataclasses.replace(
    calculator.get_config(), model=PUBLISHED[name].model, algorithm=AlgorithmConfig(**algorithm)
  )


@pytest.mark.parametrize("name", PUBLISHED)
def test_matrices_are_two_flops_per_active_parameter(name):
  """All parameters that a token meets, without the embedding (a look-up) and without norms and biases (< 1 %)."""
  model = PUBLISHED[name].model
  flops = token_flops(model, 0)
  embedding = 0 if model.tie_embeddings else model.vocab_size * model.d_model
  second = 2 * (active_params(model) - embedding)
  assert flops.trunk + flops.head == pytest.approx(second, rel=0.02)


def test_a_step_of_qwen_by_hand():
  """Dense attention: every layer 2 products of 32 heads of 128 over half the row; K = 2, frozen attention."""
  length, name = 131_072, "Qwen3-30B-A3B"
  matrices = 2 * (active_params(PUBLISHED[name].model) - 2 * 151_936 * 2048)
  attention_matrices = 2 * 48 * (2048 * 128 * (32 + 4 + 4) + 32 * 128 * 2048)
  scores, head = 48 * 2 * 2 * 32 * 128 * length / 2, 2 * 151_936 * 2048
  policy = 3 * (matrices + scores + head)
  critic = 2 * (3 * (matrices + scores) - attention_matrices) + matrices + scores
  assert step_flops(published_run(name), length) == pytest.approx(policy + critic, rel=0.02)
  assert step_flops(published_run(name, advantage="grpo"), length) == pytest.approx(policy, rel=0.02)

  # No gradients of weights: of the policy with LoRA, and then of the critic.
  adapted = dataclasses.replace(published_run(name).model, lora=LoRAConfig(rank=8))
  run = dataclasses.replace(published_run(name), model=adapted)
  policy -= matrices + head
  assert step_flops(run, length) == pytest.approx(policy + critic, rel=0.02)
  critic -= 2 * (matrices - attention_matrices)
  run = dataclasses.replace(run, critic=CriticConfig(lora=LoRAConfig(rank=8)))
  assert step_flops(run, length) == pytest.approx(policy + critic, rel=0.02)


def test_sparse_attention_reads_what_its_indexer_chooses():
  flops = token_flops(PUBLISHED["GLM-5.2"].model, 131_072)
  # 21 indexers score half a row with 32 heads of 128; attention reads 2048 positions of 256 + 256 numbers in 64 heads.
  assert flops.indexer == pytest.approx(21 * 2 * 32 * 128 * 65_536, rel=0.05)
  assert flops.scores == 78 * 2 * 64 * 2048 * (256 + 256)


def test_the_roofline_by_hand():
  chip = CHIPS["v5p"]
  products = [
    Product(459e12, 1, 3, "", "dot"),
    Product(459e12, 6, 1, "", "dot"),
    Product(459e12, 1, 6, "splash_mha", ""),
  ]
  bound = roofline(chip, products, 2 * 2765e9, {"fsdp": (180e9, 180e9), "data*expert": (360e9, 90e9)}, efficiency=0.6)
  assert (bound.mxu, bound.kernels, bound.hbm, bound.ici) == pytest.approx((3 + 6 + 6, 6, 2, 1 + 4))
  assert bound.mxu_expected == pytest.approx(9 + 10) and bound.bound_by == "MXU"
  assert utilisation(chip, 459e12 * 9.5, bound.seconds) == pytest.approx(0.5)
  slow = roofline(chip, [], 2765e9, {"context": (360e9, 90e9)})
  assert slow.bound_by == "ICI" and slow.seconds == pytest.approx(4)


def test_bandwidth_follows_the_torus():
  device = lambda *coords: types.SimpleNamespace(coords=coords)
  devices = np.empty((4, 4, 2), object)
  for index in np.ndindex(devices.shape):
    devices[index] = device(*index)
  mesh = types.SimpleNamespace(axis_names=("data", "fsdp", "expert"), devices=devices.reshape(4, 4, 2))
  mesh.shape = dict(zip(mesh.axis_names, devices.shape, strict=True))
  chip = CHIPS["v5p"]
  # Axes of 4 are rings of two links, one of 2 is a line; both together use the links of both.
  assert axis_bandwidth(mesh, ["fsdp"], chip) == 180e9 and axis_bandwidth(mesh, ["expert"], chip) == 90e9
  assert axis_bandwidth(mesh, ["data", "fsdp"], chip) == 360e9


def test_names_of_topologies():
  assert chip_of("v6e:16x16") is CHIPS["v6e"]
  assert [topology_of(CHIPS["v5p"], count) for count in (4, 8, 16, 64, 512)] == [
    *("v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:4x4x4", "v5p:8x8x8")
  ]
  assert topology_of(CHIPS["tpu7x"], 8) == "tpu7x:2x2x1" and topology_of(CHIPS["v5e"], 8) == "v5e:2x4"
  for name in ("v4:2x2x1", "v5p", "v5p:8"):
    with pytest.raises(ConfigError, match="no topology"):
      chip_of(name)
