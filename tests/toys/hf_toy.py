"""Small Hugging Face folders, made without transformers."""

from __future__ import annotations

import json

import jax
import numpy as np

from sao_jax.config import ModelConfig
from sao_jax.huggingface.folder import HFFolder
from sao_jax.huggingface.safetensors_file import NAMES, PlannedTensor, write_file
from sao_jax.huggingface.save import export_policy
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import init_params

DENSE = ModelConfig(
  vocab_size=40, num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, head_dim=4, d_ff=24, initializer_range=0.1
)
TIED = ModelConfig(
  vocab_size=40, num_layers=1, d_model=16, num_heads=2, num_kv_heads=2, head_dim=4, d_ff=24, tie_embeddings=True
)
GLM = ModelConfig(
  vocab_size=40,
  num_layers=3,
  d_model=16,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  d_ff=24,
  num_experts=4,
  d_ff_expert=8,
  d_ff_shared=8,
  num_dense_layers=1,
  router="sigmoid",
  attention_bias=True,
  rotary_fraction=0.5,
)


def random_params(config, seed=0):
  """Initial parameters, and random numbers where those would be zeros or ones."""
  params = init_params(param_specs(config), jax.random.key(seed))
  leaves, structure = jax.tree.flatten(params)
  noise = [
    0.1 * np.random.default_rng(i).standard_normal(leaf.shape).astype(np.float32) for i, leaf in enumerate(leaves)
  ]
  return jax.tree.unflatten(structure, [(leaf + x).astype(leaf.dtype) for leaf, x in zip(leaves, noise, strict=True)])


def make_folder(path, config, **options):
  """A folder of this shape with random parameters; returns it and them."""
  params = random_params(config)
  export_policy(params, config, path, **options)
  return HFFolder(path), params


def change_folder(folder, *, tensors=(), fields=(), remove=()):
  """Replaces, adds and removes tensors and fields; all tensors end up in model.safetensors."""
  arrays = {name: folder.read(name) for name in folder.tensors if name not in remove} | dict(tensors)
  for file in folder.path.glob("model*"):
    file.unlink()
  planned = [PlannedTensor(n, NAMES[a.dtype], a.shape, [np.ascontiguousarray(a).tobytes()]) for n, a in arrays.items()]
  write_file(folder.path / "model.safetensors", planned)
  changed = {name: value for name, value in (folder.fields | dict(fields)).items() if name not in remove}
  (folder.path / "config.json").write_text(json.dumps(changed))
  return folder.path
