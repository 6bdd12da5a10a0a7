"""Records as tasks: the fields that were named, and splits that share nothing."""

from __future__ import annotations

import json
import pickle

import pytest

from sao_jax.episode import BadPrompt
from sao_jax.errors import ConfigError
from sao_jax.gateway.task_records import TaskRecords


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "tasks.jsonl"
  lines = [json.dumps({"problem": f"{i}+1", "meta": {"repo": ["a", i]}, "more": 1}) for i in range(60)]
  path.write_text("\n".join([*lines, "{damaged"]) + "\n")
  return str(path)


def test_a_task_has_the_fields_that_were_named(file):
  records = TaskRecords(file, ("problem", "meta.repo"))
  prompts = records.prompts(None, "train", 0)
  number = int(prompts[0].data["problem"].partition("+")[0])
  assert prompts[0].data == {"problem": f"{number}+1", "meta.repo": ["a", number]}
  assert pickle.loads(pickle.dumps(records)) == records


def test_splits_share_no_record_and_lose_none(file):
  records = TaskRecords(file, ("problem",))
  train, heldout = (records.prompts(None, split, 0) for split in ("train", "heldout"))
  with pytest.raises(BadPrompt, match="tasks.jsonl"):  # the damaged one, where it is skipped and counted
    train[len(train) - 1]
  seen = [
    prompts[i].data["problem"] for prompts, size in ((train, -1), (heldout, 0)) for i in range(len(prompts) + size)
  ]
  assert sorted(seen) == sorted(f"{i}+1" for i in range(60)) and len(heldout) > 0
  own = TaskRecords(file, ("problem",), heldout_data=file)
  assert len(own.prompts(None, "train", 0)) == len(own.prompts(None, "heldout", 0)) == 61


@pytest.mark.parametrize("fields", [(), "problem"])
def test_no_fields_are_refused(file, fields):
  with pytest.raises(ConfigError, match="names no field"):
    TaskRecords(file, fields)
