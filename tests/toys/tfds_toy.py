"""A tiny TFDS data set, prepared without TensorFlow."""

from __future__ import annotations

import pathlib

import numpy as np
import tensorflow_datasets as tfds


class SaoTinyQuestions(tfds.core.GeneratorBasedBuilder):
  """Ten questions."""

  VERSION = tfds.core.Version("1.0.0")

  def _info(self):
    features = {"text": tfds.features.Text(), "label": np.int64, "tags": tfds.features.Sequence(tfds.features.Text())}
    return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

  def _split_generators(self, dl_manager):
    return {"train": self._generate_examples()}

  def _generate_examples(self):
    for number in range(10):
      yield number, {"text": f"{number} é?", "label": number, "tags": ["a", "b"]}


def prepare(path: pathlib.Path) -> pathlib.Path:
  """Writes the data set below `path`."""
  SaoTinyQuestions(data_dir=path, file_format="array_record").download_and_prepare()
  return path
