"""Data sets in a bucket (gs://): the same prompts as from a disk, file by file and by folder."""

from __future__ import annotations

import json

import pytest
from toys import bucket_toy

from sao_jax.data.records import RecordPrompts
from sao_jax.environments.question_answer import QuestionAnswer
from sao_jax.errors import ConfigError

ROWS = [{"q": f"é{number}?", "a": number} for number in range(7)]
FIELDS = {"question": "q", "answer": "a"}


@pytest.fixture(scope="module")
def objects():
  objects, variables = bucket_toy.of_this_process()
  with pytest.MonkeyPatch.context() as patch:
    for name, value in variables.items():
      patch.setenv(name, value)
    yield objects


def lines(rows):
  return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def read(path, split=""):
  prompts = RecordPrompts(path, environment="e", fields=FIELDS, split=split)
  return [prompts[index].data["answer"] for index in range(len(prompts))]


def test_lines_and_folders_in_a_bucket_are_read_by_number(objects):
  objects.put("data/one.jsonl", lines(ROWS))
  assert read("gs://bucket/data/one.jsonl") == [*range(7)]

  # A folder of several splits, and what a run asks of it.
  objects.put("data/many/train-00001-of-00002.jsonl", lines(ROWS[2:4]))
  objects.put("data/many/train-00000-of-00002.jsonl", lines(ROWS[:2]))
  objects.put("data/many/test.jsonl", lines(ROWS[4:]))
  assert read("gs://bucket/data/many", "train") == [0, 1, 2, 3]
  many = {"data": "gs://bucket/data/many", "split": "train", "heldout_split": "test"}
  asked = QuestionAnswer(**many, question="q", answer="a", scorer="integer")
  assert [len(asked.prompts(asked.tokenizer(), split, 0)) for split in ("train", "heldout")] == [4, 3]

  # What is put there later is seen.
  objects.put("data/many/validation.jsonl", lines(ROWS[:1]))
  assert read("gs://bucket/data/many", "validation") == [0]


def test_parquet_in_a_bucket_is_read_by_row_groups(tmp_path, objects):
  pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
  parquet = pytest.importorskip("pyarrow.parquet")
  parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "x.parquet", row_group_size=3)
  objects.put("data/test-00000-of-00001.parquet", (tmp_path / "x.parquet").read_bytes())
  assert read("gs://bucket/data/test-00000-of-00001.parquet") == [*range(7)]


@pytest.mark.parametrize("path", ["gs://bucket/none.jsonl", "gs://bucket/none.parquet", "gs://bucket/none"])
def test_what_is_not_in_the_bucket_is_refused_by_its_address(objects, path):
  with pytest.raises(ConfigError, match=path):
    read(path)


def test_a_missing_package_is_named_before_the_bucket_is_asked(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(ConfigError, match=r"(?s)gs://bucket/data is in a bucket.*\[gcs\]"):
    read("gs://bucket/data")
