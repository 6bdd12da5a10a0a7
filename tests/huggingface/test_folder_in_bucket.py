"""Hugging Face folders in a bucket: read by ranges, written in place, never copied to a disk."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc

import jax
import numpy as np
import pytest
from toys import bucket_toy, hf_toy

from sao_jax.config import MeshConfig
from sao_jax.configuration.paths import located
from sao_jax.errors import ConfigError
from sao_jax.huggingface import byte_ranges, safetensors_file
from sao_jax.huggingface.convert import to_checkpoint, to_hf
from sao_jax.huggingface.folder import HFFolder, is_hf_folder
from sao_jax.huggingface.load import import_policy, load_leaves
from sao_jax.huggingface.pretrained import base_folder
from sao_jax.huggingface.save import export_policy
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.mesh import make_mesh


@pytest.fixture(scope="module")
def objects():
  objects, variables = bucket_toy.of_this_process()
  with pytest.MonkeyPatch.context() as patch:
    for name, value in variables.items():
      patch.setenv(name, value)
    yield objects


def put(objects, folder, name):
  """Copies a folder to the bucket."""
  for path in folder.path.iterdir():
    objects.put(f"{name}/{path.name}", path.read_bytes())
  return f"gs://bucket/{name}"


def same(a, b):
  return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


def test_a_folder_is_read_shard_by_shard_as_from_a_disk(tmp_path, objects, monkeypatch):
  monkeypatch.setattr(safetensors_file, "CHUNK", 200)  # several requests for a part of the columns
  folder, params = hf_toy.make_folder(tmp_path / "a", hf_toy.TIED, shard_bytes=3000)
  address = put(objects, folder, "hf/a")
  assert is_hf_folder(located(address)) and base_folder(address).model_config() == hf_toy.TIED
  monkeypatch.setattr(byte_ranges, "CHUNK", 1000)  # and for all of them
  remote, embedding = HFFolder(address), "model.embed_tokens.weight"
  np.testing.assert_array_equal(remote.read(embedding), folder.read(embedding))
  np.testing.assert_array_equal(remote.read(embedding, ((7, 31), (3, 9))), folder.read(embedding, ((7, 31), (3, 9))))
  mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
  assert same(import_policy(address, hf_toy.TIED, mesh), params)


def test_a_damaged_file_is_named(tmp_path, objects):
  folder, _ = hf_toy.make_folder(tmp_path / "a", hf_toy.TIED)
  address = put(objects, folder, "hf/cut")
  (file,) = folder.path.glob("*.safetensors")
  objects.put(f"hf/cut/{file.name}", file.read_bytes()[:900])
  with pytest.raises(ConfigError, match=rf"{address}/{file.name} cannot be read"):
    HFFolder(address)


def test_memory_is_bounded_by_the_largest_tensor_and_what_is_read_ahead(tmp_path, objects, monkeypatch):
  config = dataclasses.replace(hf_toy.DENSE, vocab_size=2048, d_model=64, d_ff=2048, num_layers=4)
  folder, _ = hf_toy.make_folder(tmp_path / "a", config)
  largest, total = (f(tensor.num_bytes for tensor in folder.tensors.values()) for f in (max, sum))
  assert total > 12 * largest
  address, specs = put(objects, folder, "hf/large"), param_specs(config)
  monkeypatch.setattr("sao_jax.huggingface.folder._BYTES_TOGETHER", largest)
  monkeypatch.setattr(byte_ranges, "CHUNK", 1 << 16)
  remote = HFFolder(address)
  table = remote.family.tensor_table(config, specs)
  load_leaves(remote, table, specs, None)  # compiles
  tracemalloc.start()
  try:
    load_leaves(remote, table, specs, None)
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  # The server is in this process, and holds each answer that it gives.
  assert peak <= 6 * largest


def test_an_export_is_that_on_a_disk_and_what_another_has_left_is_no_folder(tmp_path, objects):
  folder, params = hf_toy.make_folder(tmp_path / "a", hf_toy.GLM, shard_bytes=3000)
  address = "gs://bucket/hf/export"
  objects.put("hf/export/model-00001-of-00009.safetensors", b"of an export that was killed")
  assert not is_hf_folder(address)
  export_policy(params, hf_toy.GLM, address, shard_bytes=3000)
  written = {
    name.removeprefix("hf/export/"): data for name, (_, data) in objects.items() if name.startswith("hf/export/")
  }
  assert written.pop("model-00001-of-00009.safetensors")
  assert written == {path.name: path.read_bytes() for path in folder.path.iterdir()}
  assert list(objects)[-1] == "hf/export/config.json"  # the last one makes it a folder
  with pytest.raises(ConfigError, match="gs://bucket/hf/export is not empty"):
    export_policy(params, hf_toy.GLM, address)
  objects.put("hf/other/model.safetensors", b"would be read first, and no export writes it")
  with pytest.raises(ConfigError, match="gs://bucket/hf/other is not empty"):
    export_policy(params, hf_toy.GLM, "gs://bucket/hf/other")


def test_conversion_from_a_bucket_to_a_bucket_and_back(tmp_path, objects):
  folder, params = hf_toy.make_folder(tmp_path / "a", hf_toy.TIED)
  (folder.path / "tokenizer.json").write_text('{"a": 1}')
  address = put(objects, folder, "hf/tied")
  to_checkpoint(address, "gs://bucket/converted")
  to_hf("gs://bucket/converted", "gs://bucket/hf/back")
  assert same(import_policy("gs://bucket/hf/back", hf_toy.TIED), params)
  assert objects["hf/back/tokenizer.json"][1] == b'{"a": 1}'
  assert json.loads(objects["hf/back/config.json"][1]) == HFFolder(address).fields
  with pytest.raises(ConfigError, match="gs://bucket/converted is not empty"):
    to_checkpoint(address, "gs://bucket/converted")
