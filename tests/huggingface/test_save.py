"""Writing folders: what is in them, what is kept of the folder a model came from, and critics."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from toys import hf_toy

from sao_jax.config import MeshConfig
from sao_jax.errors import ConfigError
from sao_jax.huggingface.folder import HFFolder
from sao_jax.huggingface.load import check_tensors, import_policy, load_leaves
from sao_jax.huggingface.safetensors_file import read_header
from sao_jax.huggingface.save import export_critic, export_policy, stored_entry
from sao_jax.models.critic import critic_params_from_policy, critic_specs
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.mesh import make_mesh

# What a folder holds beside the policy: one more layer in FP8, with its scales.
BEYOND = {
  "model.layers.1.eh_proj.weight": np.arange(16 * 32).reshape(16, 32).astype(ml_dtypes.float8_e4m3fn),
  "model.layers.1.eh_proj.weight_scale_inv": np.full((1, 1), 0.5, np.float32),
}
GLM = dataclasses.replace(hf_toy.GLM, num_layers=1, num_dense_layers=0, attention_bias=False)


def same(a, b):
  return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


def test_a_tied_head_is_stored_once(tmp_path):
  """L16."""
  folder, params = hf_toy.make_folder(tmp_path / "a", hf_toy.TIED)
  assert "lm_head.weight" not in folder.tensors and folder.fields["tie_word_embeddings"] is True
  total = json.loads((folder.path / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
  assert total == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_from_a_mesh_in_several_files(tmp_path):
  """Shards are gathered tensor by tensor; the files are those of one device."""
  folder, params = hf_toy.make_folder(tmp_path / "a", GLM, shard_bytes=3000)
  mesh = make_mesh(MeshConfig(fsdp=1, expert=2, tensor=2), jax.devices()[:4])
  sharded = jax.device_put(params, Layout(mesh).param_shardings(param_specs(GLM)))
  export_policy(sharded, GLM, tmp_path / "b", shard_bytes=3000)
  names = sorted(path.name for path in folder.path.iterdir())
  assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
  files = [name for name in names if name.endswith(".safetensors")]
  assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
  for name in names:
    assert (folder.path / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_a_tensor_of_a_stack_that_is_split_is_taken_without_gathering_the_stack():
  mesh = make_mesh(MeshConfig(fsdp=1, expert=4, tensor=2), jax.devices()[:8])
  sharding = NamedSharding(mesh, PartitionSpec(None, "expert", None, "tensor"))
  values = np.random.default_rng(0).standard_normal((2, 64, 16, 8), np.float32)
  values[1, 3, 0, :3] = np.nan, -0.0, np.inf  # beside the entry, and in another
  values[1, 5, 0, 0] = -0.0
  leaf, settings = (
    jax.device_put(values, sharding),
    (1, np.float32, NamedSharding(mesh, PartitionSpec()), (False, True)),
  )
  entry = lambda position: stored_entry(leaf, np.array(position, np.int32), *settings)
  for position in ((1, 3), (1, 5), (0, 63)):
    assert np.asarray(entry(position)).tobytes() == np.ascontiguousarray(values[position].T).tobytes()

  # What a device needs beside its share of the stack: less than half of what one layer has.
  compiled = stored_entry.lower(leaf, np.array((1, 3), np.int32), *settings).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < values[0].nbytes // 2


def test_host_memory_is_bounded_by_the_largest_tensor(tmp_path):
  config = dataclasses.replace(hf_toy.DENSE, vocab_size=2048, d_model=64, d_ff=2048, num_layers=4)
  folder, params = hf_toy.make_folder(tmp_path / "a", config)  # compiles
  largest, total = (f(tensor.num_bytes for tensor in folder.tensors.values()) for f in (max, sum))
  tracemalloc.start()
  try:
    export_policy(params, config, tmp_path / "b")
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert total > 12 * largest and peak <= 2 * largest


def test_what_is_kept_of_the_folder_it_came_from(tmp_path):
  """config.json, the tokenizer, and byte for byte the tensors beyond the trunk; not how the weights were quantised."""
  folder, params = hf_toy.make_folder(tmp_path / "a", GLM)
  quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
  fields = {"num_nextn_predict_layers": 1, "eos_token_id": [3, 4], "quantization_config": quantization}
  base = HFFolder(hf_toy.change_folder(folder, tensors=BEYOND, fields=fields))
  (base.path / "tokenizer.json").write_text('{"a": 1}')
  (base.path / "pytorch_model.bin").write_bytes(b"pickled")
  export_policy(params, GLM, tmp_path / "b", base=base, dtype="bfloat16")
  exported = HFFolder(tmp_path / "b")
  for name in BEYOND:
    assert exported.tensors[name].dtype == base.tensors[name].dtype
    assert b"".join(exported.tensors[name].read_bytes()) == b"".join(base.tensors[name].read_bytes())
  expected = {**folder.fields, **fields, "torch_dtype": "bfloat16"}
  del expected["quantization_config"]
  assert exported.fields == expected
  assert (tmp_path / "b" / "tokenizer.json").read_text() == '{"a": 1}'
  assert not (tmp_path / "b" / "pytorch_model.bin").exists()


def test_nothing_is_overwritten(tmp_path):
  folder, params = hf_toy.make_folder(tmp_path / "a", hf_toy.TIED)
  with pytest.raises(ConfigError, match="is not empty"):
    export_policy(params, hf_toy.TIED, folder.path)
  other = dataclasses.replace(hf_toy.TIED, rope_theta=5.0)
  with pytest.raises(ConfigError, match="rope_theta is 5.0, not 10000.0"):
    export_policy(params, other, tmp_path / "b", base=folder)
  assert not (tmp_path / "b").exists()


def test_critics(tmp_path):
  """The policy's format without a language-model head, and a file with the value head: all of it is there."""
  policy = hf_toy.random_params(hf_toy.DENSE)
  params = critic_params_from_policy(policy, hf_toy.DENSE, 3, "normal", jax.random.key(1), reads_logprobs=True)
  export_critic(params, hf_toy.DENSE, tmp_path / "a")
  folder = HFFolder(tmp_path / "a")
  assert folder.fields["architectures"] == ["Qwen3Model"]
  assert "lm_head.weight" not in folder.tensors and "value_head.weight" not in folder.tensors
  specs = critic_specs(hf_toy.DENSE, 3)
  del specs["value_head"]
  check_tensors(folder, hf_toy.DENSE, specs)
  loaded = load_leaves(folder, folder.family.tensor_table(hf_toy.DENSE, specs), specs, None)
  heads = read_header(tmp_path / "a" / "value_head.safetensors")
  loaded["value_head"] = jnp.asarray(heads["value_head.weight"].read().T)
  loaded["logprob_embed"] = jnp.asarray(heads["logprob_embed.weight"].read())
  assert loaded.keys() == params.keys() and same(loaded, params)
  with pytest.raises(ConfigError, match="Qwen3Model.* not a Qwen3ForCausalLM"):
    import_policy(tmp_path / "a", hf_toy.DENSE)
