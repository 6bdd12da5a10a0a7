"""Prompts from a TFDS data set: a tiny one, prepared without TensorFlow."""

from __future__ import annotations

import json

import numpy as np
import pytest
from toys import tfds_toy

from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.data.tfds_source import TFDSPrompts, json_value
from sao_jax.errors import ConfigError

FIELDS = {"question": "text", "answer": "label", "tags": "tags"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return tfds_toy.prepare(tmp_path_factory.mktemp("tfds"))


def test_examples_become_prompts_of_json_values(data_dir):
  source = TFDSPrompts("sao_tiny_questions", "train", environment="questions", fields=FIELDS, data_dir=data_dir)
  assert len(source) == 10
  prompts = [source[index] for index in range(10)]
  assert [prompt.key for prompt in prompts] == [("questions", index, 0) for index in range(10)]
  assert sorted(prompt.data["answer"] for prompt in prompts) == list(range(10))
  for prompt in prompts:
    assert prompt.data == {
      "question": f"{prompt.data['answer']} é?",
      "answer": prompt.data["answer"],
      "tags": ["a", "b"],
    }
    assert json.loads(json.dumps(prompt.data)) == prompt.data
  assert source[3] == prompts[3]  # random access, always the same example


def test_the_iterator_resumes_exactly(data_dir):
  source = TFDSPrompts("sao_tiny_questions", "train", environment="questions", fields=FIELDS, data_dir=data_dir)
  iterator = make_prompt_iterator(source, seed=2)
  [next(iterator) for _ in range(13)]
  resumed = make_prompt_iterator(source, seed=2)
  resumed.set_state(iterator.get_state())
  assert [next(iterator) for _ in range(9)] == [next(resumed) for _ in range(9)]


def test_splits_can_be_sliced(data_dir):
  def answers(split):
    source = TFDSPrompts("sao_tiny_questions", split, environment="q", fields={"a": "label"}, data_dir=data_dir)
    return [source[index].data["a"] for index in range(len(source))]

  assert sorted(answers("train[:80%]") + answers("train[80%:]")) == list(range(10))


@pytest.mark.parametrize(
  "change, field",
  [
    ({"name": "sao_no_such_set"}, "tfds"),
    ({"split": "validation"}, "tfds"),
    ({"fields": {"question": "txt"}}, "fields"),
    ({"data_dir": "/nonexistent"}, "tfds"),
  ],
)
def test_what_does_not_exist_is_refused_on_one_screen(data_dir, change, field):
  arguments = {"name": "sao_tiny_questions", "split": "train", "fields": FIELDS, "data_dir": data_dir} | change
  with pytest.raises(ConfigError) as caught:
    TFDSPrompts(environment="questions", **arguments)
  assert caught.value.field == field
  assert len(str(caught.value).splitlines()) <= 4


def test_json_value_refuses_bytes_that_are_not_text():
  assert json_value({"a": np.float32(0.5), "b": np.arange(3), "c": [b"x"]}) == {"a": 0.5, "b": [0, 1, 2], "c": ["x"]}
  with pytest.raises(ConfigError, match="UTF-8"):
    json_value(b"\xff")
