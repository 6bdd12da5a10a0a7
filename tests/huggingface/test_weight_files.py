"""The files that hold a folder's tensors: those that transformers takes, or an error that names what is wrong."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from absl import logging
from toys import parity

from sao_jax.errors import ConfigError
from sao_jax.huggingface.safetensors_file import NAMES, PlannedTensor, write_file
from sao_jax.huggingface.weight_files import INDEX, SINGLE, find_tensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write(path, **arrays):
  write_file(path, [PlannedTensor(n, NAMES[a.dtype], a.shape, [a.tobytes()]) for n, a in arrays.items()])


def numbers(value):
  return np.full((2,), value, np.float32)


@pytest.fixture
def folder(tmp_path):
  """Two files with an index that knows neither where all of their tensors are, nor of all of them."""
  write(tmp_path / FIRST, a=numbers(1), b=numbers(2))
  write(tmp_path / SECOND, c=numbers(3))
  write_index(tmp_path, a=FIRST, c=SECOND)
  return tmp_path


def write_index(folder, **weight_map):
  (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_all_tensors_of_the_named_files_are_there(folder):
  """As in transformers, which reads whole files and not the places that the index gives."""
  write_index(folder, a=SECOND, c=FIRST)
  values = {name: tensor.read()[0] for name, tensor in find_tensors(folder).items()}
  assert values == {"a": 1, "b": 2, "c": 3}


def test_a_single_file_comes_before_an_index_and_it_is_said(folder, monkeypatch):
  said = []
  monkeypatch.setattr(logging, "warning", lambda message, *arguments: said.append(message % arguments))
  find_tensors(folder)
  assert not said
  write(folder / SINGLE, a=numbers(9))
  tensors = find_tensors(folder)
  assert tensors.keys() == {"a"} and tensors["a"].read()[0] == 9
  (line,) = said
  assert line.startswith(f"{folder / SINGLE} is read. {INDEX} beside it is not")


DAMAGES = {
  "outside": (lambda folder: write_index(folder, a="../x.safetensors"), "names ../x.safetensors, outside"),
  "absolute": (lambda folder: write_index(folder, a=str(folder / FIRST)), f"{FIRST}, outside of the folder"),
  "missing": (
    lambda folder: [(folder / name).unlink() for name in (FIRST, SECOND)],
    f"{FIRST}, {SECOND} is missing",
  ),
  "no map": (lambda folder: (folder / INDEX).write_text("{}"), f"{INDEX} has no weight_map"),
  "an empty map": (write_index, f"{INDEX} has no weight_map"),
  "no names": (lambda folder: write_index(folder, a=1), f"{INDEX} has no weight_map"),
  "no JSON": (lambda folder: (folder / INDEX).write_text("[" * 100_000), f"{INDEX} is not JSON"),
  "no text": (lambda folder: (folder / INDEX).write_bytes(b"\xff"), f"{INDEX} is not JSON"),
  "lost": (lambda folder: write_index(folder, a=FIRST, x=FIRST, y=FIRST), "x, y: in none of the files"),
  "twice": (lambda folder: write(folder / SECOND, b=numbers(0)), f"b is in .*{FIRST} and in .*{SECOND}"),
  "an adapter": (lambda folder: (folder / "adapter_config.json").write_text("{}"), "(?s)adapter.*merge_and_unload"),
  "pickled": (
    lambda folder: (folder / INDEX).rename(folder / "pytorch_model.bin"),
    f"pickled weights are never read. It holds {FIRST}, {SECOND}, pytorch_model.bin.",
  ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_refused(folder, name):
  damage, words = DAMAGES[name]
  damage(folder)
  with pytest.raises(ConfigError, match=words) as error:
    find_tensors(folder)
  assert str(folder) in error.value.problem


def test_the_files_are_those_that_transformers_takes(folder):
  """For every choice of files that may stand beside each other; pickled ones are refused, whatever it takes."""
  modeling = pytest.importorskip("transformers.modeling_utils", reason=parity.REASON)
  write(folder / SINGLE, a=numbers(9))
  index = (folder / INDEX).read_text()
  for single, sharded, pickled, variant in itertools.product((False, True), repeat=4):
    for path in (SINGLE, INDEX, "pytorch_model.bin", "model.fp16.safetensors"):
      (folder / path).unlink(missing_ok=True)
    if single:
      write(folder / SINGLE, a=numbers(9))
    if sharded:
      (folder / INDEX).write_text(index)
    if pickled:
      (folder / "pytorch_model.bin").write_bytes(b"")
    if variant:
      write(folder / "model.fp16.safetensors", a=numbers(8))
    try:
      theirs, _ = modeling._get_resolved_checkpoint_files(str(folder), None, None, None, None, False)
    except OSError:
      theirs = []
    if single or sharded:
      assert {str(tensor.path) for tensor in find_tensors(folder).values()} == set(theirs)
    else:
      assert theirs == [str(folder / "pytorch_model.bin")] * pickled
      with pytest.raises(ConfigError, match="holds neither"):
        find_tensors(folder)
