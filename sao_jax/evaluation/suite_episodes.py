"""Episodes of a benchmark on a disk, one line each as soon as it ends, so that what was begun can be gone on with.

A folder has one file for each process: `episodes.0.jsonl`, whose first line tells on what the episodes were run. A line
that a kill has torn is none, and a later line about the same episode stands for it: one that failed is tried again.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from sao_jax.configuration import config_tree
from sao_jax.episode import BadPrompt, Trajectory
from sao_jax.errors import ConfigError
from sao_jax.evaluation.fixed_policy import Outcome
from sao_jax.report.line_file import LineFile
from sao_jax.report.metrics import to_json

IDENTITY = "evaluates"  # key of the first line
FILES = "episodes.*.jsonl"


@dataclasses.dataclass(frozen=True)
class SuiteEpisode:
  """Record of one episode.

  Attributes:
    problem: its number in the data.
    run: the number of the attempt, from 0.
    outcome: graded; failed, by a fault of the environment; skipped, since nobody can attempt or grade the problem.
    reward: of a graded one.
    status: how it ended, if it was graded.
    tokens: sampled ones.
    turns: of the policy.
    tool_calls, tool_errors: as the environment counts them.
    reason: why it was not graded.
    texts: what the environment leaves, such as a patch.
  """

  problem: int
  run: int
  outcome: Literal["graded", "failed", "skipped"]
  reward: float | None = None
  status: str = ""
  tokens: int = 0
  turns: int = 0
  tool_calls: float = 0.0
  tool_errors: float = 0.0
  reason: str = ""
  texts: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def done(self) -> bool:
    """True unless it is worth another try."""
    return self.outcome != "failed"


def suite_episode(problem: int, run: int, outcome: Outcome, texts: Mapping[str, str]) -> SuiteEpisode:
  """Makes the record of an episode that has ended."""
  if isinstance(outcome, Trajectory):
    counts = {name: float(outcome.info.get(name, 0.0)) for name in ("tool_calls", "tool_errors")}
    lengths = {"tokens": outcome.num_sampled, "turns": int(np.size(outcome.turn_starts))}
    reward = float(outcome.reward)
    return SuiteEpisode(problem, run, "graded", reward, outcome.status.value, **lengths, **counts, texts=dict(texts))
  kind = "skipped" if isinstance(outcome, BadPrompt) else "failed"
  return SuiteEpisode(problem, run, kind, reason=f"{type(outcome).__name__}: {outcome}"[:500])


class EpisodeFile:
  """The file of one process; a context manager."""

  def __init__(self, folder: pathlib.Path, process: int, identity: Mapping[str, Any]):
    """Opens the file behind its last whole line.

    Args:
      folder: of the suite's episodes, which is made if need be.
      process: index of this process.
      identity: what is evaluated, and on what, in JSON values.

    Raises:
      ConfigError: the folder has episodes of something else; it names the fields.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob(FILES)):
      _check_identity(path, folder, identity)
    path = folder / f"episodes.{process}.jsonl"
    whole = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
    if whole[2]:  # torn by a kill
      with path.open("rb+") as file:
        file.truncate(len(whole[0]) + len(whole[1]))
    self._file = LineFile(path)
    if not whole[1]:
      self._file.append({IDENTITY: identity})

  def append(self, episode: SuiteEpisode) -> None:
    """Writes the record of an episode."""
    self._file.append(to_json(dataclasses.asdict(episode)))

  def __enter__(self) -> EpisodeFile:
    return self

  def __exit__(self, *unused: object) -> None:
    self._file.close()


def read_episodes(folder: pathlib.Path) -> dict[tuple[int, int], SuiteEpisode]:
  """Reads the episodes of all processes, by problem and run."""
  found: dict[tuple[int, int], SuiteEpisode] = {}
  for path in sorted(folder.glob(FILES)):
    for line in _lines(path):
      if IDENTITY not in line:
        episode = SuiteEpisode(**line)
        key = episode.problem, episode.run
        if key not in found or not found[key].done:
          found[key] = episode
  return found


def _check_identity(path: pathlib.Path, folder: pathlib.Path, identity: Mapping[str, Any]) -> None:
  """Refuses a file whose episodes are of another evaluation."""
  lines = _lines(path)
  before = lines[0].get(IDENTITY) if lines else None
  if lines and before is None:
    raise ConfigError("--suite", f"{path} does not say what it holds.", f"Move {folder} away.")
  changed = config_tree.differences(before, json.loads(json.dumps(identity))) if lines else []
  if changed:
    field, old, new = changed[0]
    remedy = f"Evaluate as before, or move {folder} away to begin again."
    raise ConfigError("--suite", f"{folder} has episodes with {field}={old!r:.80}, not {new!r:.80}.", remedy)


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """Reads the whole lines of a file."""
  whole = path.read_bytes().rpartition(b"\n")[0]
  return [json.loads(line) for line in whole.split(b"\n") if line]
