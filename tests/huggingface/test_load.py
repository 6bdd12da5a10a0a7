"""Reading folders: sharded, in pieces, from FP8, and with one error for all that is wrong."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from absl import logging
from toys import hf_toy

from sao_jax.config import MeshConfig
from sao_jax.errors import ConfigError
from sao_jax.huggingface.folder import HFFolder, is_hf_folder
from sao_jax.huggingface.load import count_not_finite, import_policy, load_leaf, load_leaves
from sao_jax.huggingface.safetensors_file import read_header
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.mesh import make_mesh

UP = "model.layers.1.mlp.up_proj.weight"


def assert_same(ours, theirs):
  assert jax.tree.structure(ours) == jax.tree.structure(theirs)
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_sharded_on_a_mesh(tmp_path):
  """The same numbers, where the mesh wants them; every byte is read once, although devices hold copies."""
  folder, params = hf_toy.make_folder(tmp_path / "a", hf_toy.GLM)
  mesh = make_mesh(MeshConfig(fsdp=1, expert=2, tensor=2), jax.devices()[:4])
  specs = param_specs(hf_toy.GLM)
  loaded = load_leaves(folder, folder.family.tensor_table(hf_toy.GLM, specs), specs, mesh)
  assert_same(loaded, params)
  shardings = Layout(mesh).param_shardings(specs)
  jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding or pytest.fail(str(sharding)), loaded, shardings)
  assert folder.bytes_read == sum(tensor.num_bytes for tensor in folder.tensors.values())


def test_a_process_reads_its_own_bytes_only(tmp_path, monkeypatch):
  """With one of four devices addressable, as on one of four hosts, a quarter of a tensor is read."""
  folder, _ = hf_toy.make_folder(tmp_path / "a", hf_toy.DENSE)
  mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
  specs = param_specs(hf_toy.DENSE)
  spec, sharding = (tree["dense_layers"]["mlp"]["up"] for tree in (specs, Layout(mesh).param_shardings(specs)))
  table = folder.family.tensor_table(hf_toy.DENSE, specs)
  everything = type(sharding).addressable_devices_indices_map
  mine = lambda self, shape: dict(list(everything(self, shape).items())[:1])
  monkeypatch.setattr(type(sharding), "addressable_devices_indices_map", mine)
  shards = []
  monkeypatch.setattr(
    jax, "make_array_from_single_device_arrays", lambda shape, sharding, parts: shards.extend(parts) or parts[0]
  )
  shard = load_leaf(folder, table["dense_layers/mlp/up"], spec, sharding)
  assert shard.shape == (2, 8, 12) and len(shards) == 1
  assert folder.bytes_read == spec.shape[0] * folder.tensors[UP].num_bytes // 4


def test_host_memory_is_bounded_by_the_largest_tensor(tmp_path):
  """Peak of what Python and NumPy hold beside the devices' arrays; the model has 20 times the largest tensor."""
  config = dataclasses.replace(hf_toy.DENSE, vocab_size=2048, d_model=64, d_ff=2048, num_layers=8)
  folder, _ = hf_toy.make_folder(tmp_path / "a", config)
  largest = max(tensor.num_bytes for tensor in folder.tensors.values())
  assert sum(tensor.num_bytes for tensor in folder.tensors.values()) > 20 * largest
  specs = param_specs(config)
  table = folder.family.tensor_table(config, specs)
  load_leaves(folder, table, specs, None)  # compiles
  tracemalloc.start()
  try:
    loaded = load_leaves(folder, table, specs, None)
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert peak <= 2 * largest
  assert loaded["dense_layers"]["mlp"]["up"].shape == (8, 64, 2048)


def test_storage_dtypes(tmp_path):
  """bf16 folders widen exactly; an fp32 folder is rounded once; a sigmoid router and its bias stay in fp32."""
  config = dataclasses.replace(hf_toy.GLM, num_layers=1, num_dense_layers=0, attention_bias=False, d_ff_shared=0)
  folder, params = hf_toy.make_folder(tmp_path / "a", config, dtype="bfloat16")
  assert {tensor.dtype for tensor in folder.tensors.values()} == {"BF16", "F32"}
  wide = import_policy(folder.path, config)
  narrow = import_policy(folder.path, dataclasses.replace(config, param_dtype="bfloat16"))
  assert narrow["embed"].dtype == ml_dtypes.bfloat16 and wide["embed"].dtype == np.float32
  np.testing.assert_array_equal(wide["embed"], params["embed"].astype(ml_dtypes.bfloat16).astype(np.float32))
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), wide, narrow)
  for loaded in (wide, narrow):
    for name in ("router", "correction_bias"):
      assert loaded["moe_layers"]["moe"][name].dtype == np.float32
      np.testing.assert_array_equal(loaded["moe_layers"]["moe"][name], params["moe_layers"]["moe"][name])


@pytest.mark.parametrize("on_mesh", [False, True])
def test_fp8(tmp_path, on_mesh):
  """Blocks of 128 x 128, the last ones partial; shards that begin inside a block."""
  config = dataclasses.replace(hf_toy.TIED, d_model=192, d_ff=320)
  folder, _ = hf_toy.make_folder(tmp_path / "a", config)
  name, rng = "model.layers.0.mlp.up_proj.weight", np.random.default_rng(0)
  weight = rng.standard_normal((320, 192)).astype(ml_dtypes.float8_e4m3fn)
  scale = rng.uniform(0.5, 2.0, (3, 2)).astype(np.float32)
  quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
  path = hf_toy.change_folder(
    folder, tensors={name: weight, f"{name}_scale_inv": scale}, fields={"quantization_config": quantization}
  )
  expected = weight.astype(np.float32) * np.kron(scale, np.ones((128, 128), np.float32))[:320, :192]
  mesh = make_mesh(MeshConfig(fsdp=4, tensor=2)) if on_mesh else None
  loaded = import_policy(path, config, mesh)
  np.testing.assert_array_equal(loaded["dense_layers"]["mlp"]["up"][0], expected.T)


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn])
def test_numbers_that_are_not_finite_are_found_with_the_name_of_their_tensor(tmp_path, dtype, on_mesh):
  """Wherever they stand: one at the end of an embedding, whose rows lie on several devices; NaN, or infinity."""
  folder, _ = hf_toy.make_folder(tmp_path / "a", hf_toy.TIED)
  name, spoiled = "model.layers.0.mlp.up_proj.weight", np.ones((24, 16), dtype)
  spoiled[-1, -1] = np.nan if dtype == ml_dtypes.float8_e4m3fn else -np.inf
  scales = {f"{name}_scale_inv": np.ones((1, 1), np.float32)}
  fields = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
  mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4]) if on_mesh else None
  path = hf_toy.change_folder(folder, tensors={name: spoiled, **scales}, fields=fields)
  with pytest.raises(ConfigError, match=rf"{name} in .*model.safetensors has 1 numbers that are not finite"):
    import_policy(path, hf_toy.TIED, mesh)
  if dtype == ml_dtypes.float8_e4m3fn:
    spoiled[-1, -1], scales = 448, {f"{name}_scale_inv": np.full((1, 1), np.nan, ml_dtypes.bfloat16)}
    path = hf_toy.change_folder(HFFolder(path), tensors={name: spoiled, **scales})
    with pytest.raises(ConfigError, match=rf"{name}_scale_inv in .* not finite"):
      import_policy(path, hf_toy.TIED, mesh)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn])
def test_all_numbers_that_are_not_finite_are_counted(dtype):
  """Those that NumPy calls so, of all patterns of bits, or, in fp32, of all exponents, in parts of a few at a time."""
  width = np.dtype(dtype).itemsize * 8
  bits = np.arange(2**16, dtype=np.uint32) << 16 if width == 32 else np.arange(2**width)
  values = bits.astype(f"uint{width}").view(dtype)
  expected = np.count_nonzero(~np.isfinite(values.astype(np.float32)))
  assert count_not_finite(np.tile(values, 3)) == 3 * expected > 0


def test_one_error_lists_all_that_is_wrong(tmp_path):
  folder, _ = hf_toy.make_folder(tmp_path / "a", hf_toy.DENSE)
  norm = "model.norm.weight"
  path = hf_toy.change_folder(
    folder,
    remove=("lm_head.weight", "model.layers.0.self_attn.k_norm.weight"),
    tensors={
      UP: np.zeros((16, 24), np.float32),
      norm: np.zeros((16,), np.int32),
      "model.layers.0.mlp.down_proj.weight": np.zeros((16, 24), ml_dtypes.float8_e4m3fn),
      "model.layers.2.input_layernorm.weight": np.ones((16,), np.float32),
      "score.weight": np.ones((1, 16), np.float32),
    },
  )
  with pytest.raises(ConfigError) as error:
    import_policy(path, hf_toy.DENSE)
  lines = error.value.problem.splitlines()[1:]
  assert sorted(line.strip() for line in lines) == [
    "lm_head.weight [40, 16] is missing",
    "model.layers.0.mlp.down_proj.weight_scale_inv is missing, model.layers.0.mlp.down_proj.weight is in FP8",
    "model.layers.0.self_attn.k_norm.weight [4] is missing",
    f"{UP} is [16, 24], expected [24, 16]",
    "model.layers.2.input_layernorm.weight [16] is not part of the model",
    f"{norm} is I32, read are F32, BF16, F16, F8_E4M3",
    "score.weight [1, 16] is not part of the model",
  ]


def test_a_tied_head_may_be_stored_twice_but_must_be_the_same(tmp_path):
  """As in published folders of small models."""
  folder, params = hf_toy.make_folder(tmp_path / "a", hf_toy.TIED)
  assert "lm_head.weight" not in folder.tensors
  embedding = folder.read("model.embed_tokens.weight")
  path = hf_toy.change_folder(folder, tensors={"lm_head.weight": embedding})
  assert_same(import_policy(path, hf_toy.TIED), params)
  path = hf_toy.change_folder(HFFolder(path), tensors={"lm_head.weight": embedding + 1})
  with pytest.raises(ConfigError, match="lm_head.weight differs from model.embed_tokens.weight"):
    import_policy(path, hf_toy.TIED)


def test_layers_beyond_the_trunk_are_skipped_and_said(tmp_path, monkeypatch):
  folder, params = hf_toy.make_folder(tmp_path / "a", hf_toy.GLM)
  beyond = {"model.layers.3.eh_proj.weight": np.ones((16, 32), np.float32)}
  path = hf_toy.change_folder(folder, tensors=beyond, fields={"num_nextn_predict_layers": 1})
  said = []
  monkeypatch.setattr(logging, "info", lambda message, *arguments: said.append(message % arguments))
  assert_same(import_policy(path, hf_toy.GLM), params)
  assert any("1 tensors model.layers.3.*" in line for line in said)
  path = hf_toy.change_folder(HFFolder(path), fields={"num_nextn_predict_layers": 0})
  with pytest.raises(ConfigError, match="eh_proj.weight .* is not part of the model"):
    import_policy(path, hf_toy.GLM)


def test_another_shape_is_refused(tmp_path):
  folder, _ = hf_toy.make_folder(tmp_path / "a", hf_toy.DENSE)
  with pytest.raises(ConfigError, match="num_layers is 5, not 2; rope_theta is 7.0, not 10000.0"):
    import_policy(folder.path, dataclasses.replace(hf_toy.DENSE, num_layers=5, rope_theta=7.0))


BROKEN = {
  "no config": (lambda path: (path / "config.json").unlink(), "has no config.json"),
  "no JSON": (lambda path: (path / "config.json").write_text("{"), "is not JSON"),
  "no weights": (lambda path: [file.unlink() for file in path.glob("model*")], "pickled weights are never read"),
  "a file is missing": (lambda path: next(path.glob("model-*")).unlink(), "is missing"),
  "cut": (lambda path: next(path.glob("model-*")).open("r+b").truncate(900), "cannot be read"),
  "other files": (
    lambda path: (path / "model.safetensors.index.json").write_text(
      json.dumps({"weight_map": {"x": next(path.glob("model-*")).name}})
    ),
    "x: in none of the files that",
  ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folders(tmp_path, name):
  folder, _ = hf_toy.make_folder(tmp_path / "a", hf_toy.TIED)
  damage, problem = BROKEN[name]
  damage(folder.path)
  with pytest.raises(ConfigError, match=problem):
    HFFolder(folder.path)


def test_quantisations_that_are_not_read(tmp_path):
  folder, _ = hf_toy.make_folder(tmp_path / "a", hf_toy.TIED)
  path = hf_toy.change_folder(folder, fields={"quantization_config": {"quant_method": "gptq", "bits": 4}})
  with pytest.raises(ConfigError, match="'gptq' .* is not implemented"):
    HFFolder(path)
  (path / "config.json").write_text(json.dumps(folder.fields | {"quantization_config": "fp8"}))
  with pytest.raises(ConfigError, match="quantization_config: 'fp8' is not an object"):
    HFFolder(path)


def test_what_is_a_folder(tmp_path):
  assert not is_hf_folder("") and not is_hf_folder(tmp_path)
  (tmp_path / "config.json").write_text("[]")
  assert not is_hf_folder(tmp_path)


def test_files_are_those_of_the_library(tmp_path):
  """What the safetensors package reads is what was written, and the other way round."""
  library = pytest.importorskip("safetensors.numpy", reason="the extra `hf` is not installed")
  folder, _ = hf_toy.make_folder(tmp_path / "a", hf_toy.TIED)
  (file,) = folder.path.glob("model-*.safetensors")
  loaded = library.load_file(file)
  assert loaded.keys() == folder.tensors.keys()
  for name, array in loaded.items():
    np.testing.assert_array_equal(array, folder.read(name))
  library.save_file(loaded, tmp_path / "b.safetensors")
  for name, tensor in read_header(tmp_path / "b.safetensors").items():
    np.testing.assert_array_equal(tensor.read(), loaded[name])
