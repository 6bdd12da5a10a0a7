"""Numbers of a benchmark: mean and standard error over runs, avg@k, pass@k, and what the episodes took."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.episode import Status
from sao_jax.evaluation.suite import Suite
from sao_jax.evaluation.suite_episodes import SuiteEpisode


def pass_at_k(trials: int, successes: int, k: int) -> float:
  """Estimates without bias the chance that one of k attempts succeeds (arXiv 2107.03374).

  It is the share of all choices of k of the trials that have a success among them.

  >>> pass_at_k(4, 1, 2)  # 3 of the 6 pairs
  0.5
  """
  if not 0 <= successes <= trials or not 1 <= k <= trials:
    raise ValueError(f"{successes} successes of {trials} trials say nothing of {k}")
  return 1.0 - math.comb(trials - successes, k) / math.comb(trials, k)


@dataclasses.dataclass(frozen=True)
class SuiteResult:
  """Result of a benchmark. What is undefined is NaN, None in JSON.

  Attributes:
    suite: the benchmark.
    problems: numbers of the problems that have a graded episode.
    runs: attempts at each.
    graded, ungraded: episodes; ungraded ones enter no statistic.
    skipped: problems that nobody can attempt, or whose right answer cannot be compared with.
    mean: mean over problems of their share of successes.
    standard_error: deviation of the runs' means, divided by the root of their number.
    run_means: share of successes of each run.
    avg_at: k -> mean over problems, of their first k runs.
    pass_at: k -> mean over problems of `pass_at_k`; NaN where a problem has fewer graded runs.
    per_episode: means of tokens, turns, tool calls and tool errors.
    truncated: share of episodes that were cut, by the limit that cut them.
    successes: problem -> (successes, graded runs).
  """

  suite: Suite
  problems: tuple[int, ...]
  runs: int
  graded: int
  ungraded: int
  skipped: int
  mean: float
  standard_error: float
  run_means: tuple[float, ...]
  avg_at: Mapping[int, float]
  pass_at: Mapping[int, float]
  per_episode: Mapping[str, float]
  truncated: Mapping[str, float]
  successes: Mapping[int, tuple[int, int]]

  def table(self) -> str:
    """Writes the result for a terminal."""
    left_out = ((self.ungraded, "episodes could not be graded"), (self.skipped, "problems were skipped"))
    head = f"{self.suite.title}: {len(self.problems)} problems, {self.runs} runs"
    lines = [", ".join([head, *(f"{count} {what}" for count, what in left_out if count)])]
    lines.append(f"  mean   {self.mean:.4f}  (standard error over runs {self.standard_error:.4f})")
    lines.append("  k      " + " ".join(f"{k:>7}" for k in self.avg_at))
    for name, values in (("avg@k ", self.avg_at), ("pass@k", self.pass_at)):
      lines.append(f"  {name} " + " ".join(f"{value:7.4f}" for value in values.values()))
    lines.append("  " + ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in self.per_episode.items()))
    cut = sum(self.truncated.values())
    by = ", ".join(f"{name} {share:.3f}" for name, share in self.truncated.items() if share)
    lines.append(f"  truncated {cut:.3f}" + (f" ({by})" if by else ""))
    return "\n".join(lines)

  def record(self) -> dict[str, Any]:
    """Returns the numbers for a JSON file."""
    return {
      "suite": self.suite.name,
      "published_problems": self.suite.problems,
      "problems": len(self.problems),
      "skipped_problems": self.skipped,
      "runs": self.runs,
      "episodes": self.graded,
      "ungraded": self.ungraded,
      # What is undefined is NaN here, and null once it is written; keys of JSON are texts.
      "mean": self.mean,
      "standard_error": self.standard_error,
      "run_means": list(self.run_means),
      "avg_at_k": {str(k): value for k, value in self.avg_at.items()},
      "pass_at_k": {str(k): value for k, value in self.pass_at.items()},
      **{f"{name}_mean": value for name, value in self.per_episode.items()},
      "truncated": sum(self.truncated.values()),
      "truncated_by": dict(self.truncated),
      "successes": {str(problem): list(counts) for problem, counts in self.successes.items()},
    }


def summarize(suite: Suite, episodes: Iterable[SuiteEpisode], runs: int, *, threshold: float = 1.0) -> SuiteResult:
  """Computes the result.

  Args:
    suite: the benchmark.
    episodes: records, one of each problem and run.
    runs: attempts at each problem; records of further ones are left out.
    threshold: an episode succeeds when its reward is at least this; NaN is a reward that is not known yet.
  """
  counted = [episode for episode in episodes if episode.run < runs]
  graded = [episode for episode in counted if episode.outcome == "graded"]
  skipped = {episode.problem for episode in counted if episode.outcome == "skipped"}

  # One row per problem, one column per run; NaN where there is no grade.
  problems = sorted({episode.problem for episode in graded})
  table = np.full((len(problems), runs), np.nan)
  rows = {problem: row for row, problem in enumerate(problems)}
  for episode in graded:
    if not math.isnan(episode.reward):
      table[rows[episode.problem], episode.run] = episode.reward >= threshold
  trials = (~np.isnan(table)).sum(axis=1).astype(int).tolist()
  successes = np.nansum(table, axis=1).astype(int).tolist()

  run_means = [_mean(table[:, run]) for run in range(runs)]
  known = [mean for mean in run_means if not math.isnan(mean)]
  error = float(np.std(known, ddof=1) / math.sqrt(len(known))) if len(known) > 1 else math.nan
  ks = [2**power for power in range(runs.bit_length()) if 2**power <= runs]
  ks += [] if runs in ks else [runs]

  cut = [status for status in Status if status.truncated]
  share = lambda status: _mean([episode.status == status.value for episode in graded])
  return SuiteResult(
    suite=suite,
    problems=tuple(problems),
    runs=runs,
    graded=len(graded),
    ungraded=sum(episode.outcome == "failed" for episode in counted),
    skipped=len(skipped),
    mean=_mean([_mean(row) for row in table]),
    standard_error=error,
    run_means=tuple(run_means),
    avg_at={k: _mean([_mean(row[:k]) for row in table]) for k in ks},
    pass_at={k: _pass_at(trials, successes, k) for k in ks},
    per_episode={
      name: _mean([getattr(episode, name) for episode in graded])
      for name in ("tokens", "turns", "tool_calls", "tool_errors")
    },
    truncated={status.value.removeprefix("truncated(").rstrip(")"): share(status) for status in cut},
    successes={problem: (successes[row], trials[row]) for problem, row in rows.items()},
  )


def _pass_at(trials: Sequence[int], successes: Sequence[int], k: int) -> float:
  """Averages over problems; a problem with fewer than k grades leaves it undefined."""
  if any(n < k for n in trials):
    return math.nan
  return _mean([pass_at_k(n, c, k) for n, c in zip(trials, successes)])


def _mean(values: Iterable[float]) -> float:
  """Averages what is defined; NaN of nothing."""
  defined = [float(value) for value in values if not math.isnan(value)]
  return math.fsum(defined) / len(defined) if defined else math.nan
