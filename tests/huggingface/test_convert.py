"""What a converted folder holds beside the policy: multi-token prediction and a tokenizer, or a warning."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from absl import logging
from toys import hf_toy, training_toy

from sao_jax.checkpoints.checkpointer import Checkpointer
from sao_jax.configuration.run_record import write_config
from sao_jax.huggingface import convert
from sao_jax.huggingface.folder import HFFolder
from sao_jax.huggingface.pretrained import with_folder_shape

GLM = dataclasses.replace(hf_toy.GLM, num_layers=1, num_dense_layers=0, attention_bias=False)
PREDICTION = {  # of one more layer; the numbers are no model's, so that only copying keeps them
  "model.layers.1.enorm.weight": np.arange(16, dtype=np.float32) / 7,
  "model.layers.1.eh_proj.weight": (np.arange(16 * 32).reshape(16, 32) / 9).astype(ml_dtypes.bfloat16),
}
FP8 = {
  "model.layers.1.mlp.experts.0.up_proj.weight": np.arange(8 * 16).reshape(8, 16).astype(ml_dtypes.float8_e4m3fn),
  "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv": np.full((1, 1), 0.3, np.float32),
}
QUANTIZATION = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture
def warnings(monkeypatch):
  said = []
  monkeypatch.setattr(logging, "warning", lambda message, *arguments: said.append(message % arguments))
  return said


def glm_folder(path, tensors):
  """A GLM-4.5 whose multi-token-prediction layer has these tensors, and a tokenizer; returns its parameters, too."""
  folder, params = hf_toy.make_folder(path, GLM)
  fields = {"num_nextn_predict_layers": 1} | ({"quantization_config": QUANTIZATION} if tensors.keys() & FP8 else {})
  folder = HFFolder(hf_toy.change_folder(folder, tensors=tensors, fields=fields))
  (folder.path / "tokenizer.json").write_text('{"a": 1}')
  return folder, params


def stored(folder):
  """Name -> dtype, shape and bytes of all tensors."""
  return {name: (t.dtype, t.shape, b"".join(t.read_bytes())) for name, t in folder.tensors.items()}


@pytest.mark.parametrize("tensors", [PREDICTION, PREDICTION | FP8])
def test_multi_token_prediction_there_and_back(tmp_path, warnings, tensors):
  """Folder to checkpoints to folder, every tensor byte for byte; what stays in FP8 beside an fp32 policy is said."""
  source, _ = glm_folder(tmp_path / "source", tensors)
  convert.to_checkpoint(source.path, tmp_path / "checkpoint")
  expected = stored(source)
  kept = HFFolder(tmp_path / "checkpoint" / "huggingface")
  assert kept.path.joinpath("model.safetensors").is_file()
  assert stored(kept) == {name: expected[name] for name in tensors}
  assert not warnings  # the weights are still beside the config.json that tells how they are stored
  convert.to_hf(tmp_path / "checkpoint", tmp_path / "back")
  back = HFFolder(tmp_path / "back")
  assert stored(back) == expected
  assert back.fields["num_nextn_predict_layers"] == 1 and "quantization_config" not in back.fields
  if tensors.keys() & FP8:
    (warning,) = warnings
    assert warning.startswith("1 tensors of multi-token prediction stay in FP8 with their scales")
  else:
    assert not warnings


def test_an_export_without_a_base_says_what_it_lacks(tmp_path, warnings):
  """Of a run whose configuration names no folder; --base mends it."""
  source, params = glm_folder(tmp_path / "source", PREDICTION)
  config = training_toy.replace(training_toy.get_config(), model={"checkpoint": str(source.path)})
  config = training_toy.replace(with_folder_shape(config), model={"checkpoint": ""})
  write_config(config, tmp_path)
  with Checkpointer(tmp_path / "train") as checkpointer:
    checkpointer.save(1, {"policy": {"params": params}})
  convert.to_hf(tmp_path / "train", tmp_path / "alone")
  (warning,) = warnings
  assert "alone holds neither a tokenizer nor tensors of multi-token prediction" in warning and "--base" in warning
  alone = HFFolder(tmp_path / "alone")
  assert not (alone.path / "tokenizer.json").exists() and alone.fields["num_nextn_predict_layers"] == 0
  assert alone.tensors.keys() == source.tensors.keys() - PREDICTION.keys()
  warnings.clear()
  convert.to_hf(tmp_path / "train", tmp_path / "mended", base=source.path)
  assert stored(HFFolder(tmp_path / "mended")) == stored(source) and not warnings
  assert (tmp_path / "mended" / "tokenizer.json").read_text() == '{"a": 1}'
