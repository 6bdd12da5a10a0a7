"""Lines and TensorBoard events on a disk that is full for a while: nothing is torn, nothing waits for ever."""

from __future__ import annotations

import contextlib
import json
import resource

import pytest
from absl import logging

from sao_jax.report.line_file import LineFile
from sao_jax.report.metrics import MetricsWriter, read_metrics
from sao_jax.report.tensorboard import RETRY_SECONDS, TensorBoardEvents


@contextlib.contextmanager
def files_of_at_most(size: int):
  """No file of this process can grow beyond so many bytes, as on a full disk."""
  limit = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.fixture
def said(monkeypatch):
  """The errors in the log."""
  messages = []
  monkeypatch.setattr(logging, "error", lambda message, *values: messages.append(message % values))
  return messages


def read(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("room", [0, 3, 14, 20, 30])
def test_lines_wait_while_the_disk_is_full_and_follow_in_order(tmp_path, said, room):
  path = tmp_path / "lines"
  file = LineFile(path)
  with files_of_at_most(room):
    for number in range(4):
      file.append({"step": number})  # 12 bytes
    assert [line["step"] for line in read(path)] == list(range(room // 12))
  assert len(said) == 1 and "File too large" in said[0]

  file.append({"step": 4})
  assert [line["step"] for line in read(path)] == [0, 1, 2, 3, 4]
  file.close()
  assert len(said) == 1


def test_lines_that_never_find_room_are_counted_as_lost(tmp_path, said):
  file = LineFile(tmp_path / "lines")
  with files_of_at_most(15):
    for number in range(3):
      file.append({"step": number})
    file.close()
  assert [line["step"] for line in read(tmp_path / "lines")] == [0]
  assert said[-1].startswith("2 lines") and "lost" in said[-1]


def test_a_full_disk_stops_neither_the_metrics_nor_tensorboard(tmp_path, said):
  pytest.importorskip("tensorboardX")
  with MetricsWriter(tmp_path) as writer:
    with files_of_at_most(0):
      for step in range(1, 200):  # far more than the queue of a SummaryWriter holds
        writer.write(step, {"loss": 0.5, "note": "long " * 200})
    writer.write(200, {"loss": 0.5})
  assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 201))


def test_tensorboard_goes_on_in_another_file_once_there_is_room(tmp_path, said):
  pytest.importorskip("tensorboardX")
  now = 0.0
  events = TensorBoardEvents(tmp_path, None, clock=lambda: now)
  events.write(1, {"before": 1.0})

  now += 100.0
  with files_of_at_most(0):
    events.write(2, {"meanwhile": 1.0})
    events.write(3, {"meanwhile": 1.0})  # not tried: it is too early
  assert len(said) == 1

  now += RETRY_SECONDS
  events.write(4, {"after": 1.0})
  events.close()
  files = sorted(tmp_path.iterdir())
  assert len(files) == 2 and any(b"after" in file.read_bytes() for file in files)
