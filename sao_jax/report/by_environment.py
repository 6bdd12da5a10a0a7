"""Numbers of each environment of a run: what its episodes earned, and what its steps told in their `info`.

A name of a number is KEY/ENVIRONMENT, as in `heldout_success/calculator`. Names are bounded: a run has at most
`MAX_ENVIRONMENTS` of them and `MAX_FACTS` facts for each, and tells how many were left out.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence

from sao_jax.episode import Trajectory

MAX_ENVIRONMENTS, MAX_FACTS = 32, 32
OF_THE_LOOP = ("latency", "environment_seconds")  # in every `info`; they have metrics of their own
SEPARATOR = "/"


def environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Returns the numbers of a step's trajectories: how many each environment has, and the means over them.

  An episode that does not tell a fact is not in its mean; a fact that is no finite number, neither.

  Args:
    trajectories: of one step; their rewards are those that are trained on.
  """
  episodes = _by_name(trajectories)
  metrics: dict[str, float] = {"environment_names_left_out": 0}
  for name in sorted(episodes)[:MAX_ENVIRONMENTS]:
    of_name = episodes[name]
    metrics[f"environment_trajectories{SEPARATOR}{name}"] = len(of_name)
    metrics[f"environment_reward{SEPARATOR}{name}"] = sum(each.reward for each in of_name) / len(of_name)

    # What the environment told of its episodes.
    told = sorted({fact for each in of_name for fact in each.info} - set(OF_THE_LOOP))
    for fact in told[:MAX_FACTS]:
      key = f"info_{fact.replace(SEPARATOR, '_')}{SEPARATOR}{name}"
      metrics[key] = _mean(each.info[fact] for each in of_name if fact in each.info)
    metrics["environment_names_left_out"] += len(told[MAX_FACTS:])
  metrics["environment_names_left_out"] += len(episodes) - min(len(episodes), MAX_ENVIRONMENTS)
  return metrics


def success_sums(
  trajectories: Iterable[Trajectory], threshold: float, names: Iterable[str]
) -> dict[str, dict[str, float]]:
  """Returns the sums of each environment's episodes, by its name: successes, trials and rewards.

  Args:
    trajectories: of an evaluation.
    threshold: the return from which on an episode succeeds.
    names: of the environments, also of those none of whose episodes could be graded.
  """
  episodes = _by_name(trajectories)
  return {
    name: {
      "successes": sum(each.reward >= threshold for each in episodes.get(name, ())),
      "trials": len(episodes.get(name, ())),
      "reward": sum(each.reward for each in episodes.get(name, ())),
    }
    for name in sorted(set(names))[:MAX_ENVIRONMENTS]
  }


def added(shares: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
  """Adds up the sums of several processes, by environment."""
  total: dict[str, dict[str, float]] = {}
  for name, sums in ((name, sums) for share in shares for name, sums in share.items()):
    known = total.setdefault(name, dict.fromkeys(sums, 0))
    total[name] = {key: known[key] + value for key, value in sums.items()}
  return total


def weight_of(name: str) -> str | None:
  """Returns the name of the number that says over how many episodes a mean is taken; None for other numbers."""
  key, _, environment = name.partition(SEPARATOR)
  means = environment and (key == "environment_reward" or key.startswith("info_"))
  return f"environment_trajectories{SEPARATOR}{environment}" if means else None


def _by_name(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
  episodes = collections.defaultdict(list)
  for trajectory in trajectories:
    episodes[trajectory.key.environment].append(trajectory)
  return dict(episodes)


def _mean(values: Iterable[float]) -> float:
  """Returns the mean of the finite ones; NaN without any."""
  finite = [value for value in values if math.isfinite(value)]
  return sum(finite) / len(finite) if finite else math.nan
