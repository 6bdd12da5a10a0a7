"""TensorBoard events of a phase, as far as the optional tensorboardX and the disk allow."""

from __future__ import annotations

import importlib.util
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

FLUSH_SECONDS = 10.0
RETRY_SECONDS = 60.0  # after a failure, which may have left a torn file


class TensorBoardEvents:
  """Writes scalars to one event file after the other: where one cannot be written to, the next is tried a minute later.

  tensorboardX's `SummaryWriter` is not used: a full disk ends its thread, and the next calls wait for it for ever. What
  is missing here stands in the metrics file.
  """

  def __init__(self, folder: pathlib.Path, restored_step: int | None, clock: Callable[[], float] = time.monotonic):
    """Prepares; the first file is made with the first event.

    Args:
      folder: of the event files.
      restored_step: step of the checkpoint that the phase goes on from; TensorBoard hides the events beyond it.
      clock: seconds.
    """
    self._folder, self._first_step, self._clock = folder, 0 if restored_step is None else restored_step + 1, clock
    self._writer: Any = None
    self._num_files, self._flushed, self._retry_at = 0, clock(), clock()
    if importlib.util.find_spec("tensorboardX") is None:
      logging.log_first_n(
        logging.INFO, "TensorBoard events are off: tensorboardX is missing (pip install -e '.[report]').", 1
      )
      self._retry_at = float("inf")

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes the scalars of a step."""
    if self._clock() < self._retry_at:
      return
    try:
      self._write(step, scalars)
    except OSError as error:
      logging.error("TensorBoard events of %s cannot be written: %s. metrics.jsonl has all.", self._folder, error)
      self._writer, self._retry_at = None, self._clock() + RETRY_SECONDS

  def close(self) -> None:
    """Closes the file; further calls do nothing."""
    writer, self._writer, self._retry_at = self._writer, None, float("inf")
    if writer is None:
      return
    try:
      writer.close()
    except OSError as error:
      logging.error("The last TensorBoard events of %s are missing: %s.", self._folder, error)

  def _write(self, step: int, scalars: Mapping[str, float]) -> None:
    # An optional extra.
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.summary import scalar

    if self._writer is None:
      self._writer = self._next_file(step)
    for name, value in scalars.items():
      self._writer.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))

    if self._clock() - self._flushed >= FLUSH_SECONDS:
      self._writer.flush()
      self._flushed = self._clock()

  def _next_file(self, step: int) -> Any:
    """Opens a file with a name of its own; the first one says from which step on earlier events are to be hidden."""
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    self._folder.mkdir(parents=True, exist_ok=True)
    writer = EventsWriter(str(self._folder / "events"), f".{self._num_files}" if self._num_files else "")
    first = self._first_step if self._num_files == 0 else step
    writer.write_event(Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START)))
    self._num_files += 1
    return writer
