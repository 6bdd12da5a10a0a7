"""Health rules: what the metrics of the last steps say about a run that goes wrong, each with its remedy.

A rule is a pure function of a few steps: it returns a sentence while something is wrong, and None otherwise. `Health`
reads one step after another, remembers which rules have spoken, and lets each speak once until it has cleared.
Metrics that are missing, null or NaN are undefined, and no rule speaks about what is undefined.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

Steps = Sequence[Mapping[str, float]]  # the defined scalars of the last steps, oldest first

CLEAR = 10  # steps, at least, that a rule must be silent before it may speak again


@dataclasses.dataclass(frozen=True)
class Rule:
  """One thing that may go wrong.

  Attributes:
    name: a word for the record.
    steps: how many of the last steps it reads; it is silent before there are so many.
    level: a note, or a warning.
    symptom: says what is wrong and what to do, or nothing.
  """

  name: str
  steps: int
  level: Literal["note", "warning"]
  symptom: Callable[[Steps], str | None]


@dataclasses.dataclass(frozen=True)
class Alarm:
  """A rule that has begun to speak."""

  name: str
  level: Literal["note", "warning"]
  text: str

  def __str__(self) -> str:
    return f"{self.name}: {self.text}"


class Health:
  """The rules' memory.

  Attributes:
    skipped_in_a_row: steps up to the last one whose updates were left out since something was not finite.
  """

  def __init__(self, rules: Sequence[Rule] | None = None):
    """`rules`: all of them by default."""
    self.skipped_in_a_row = 0
    self._rules = RULES if rules is None else tuple(rules)
    self._steps = collections.deque(maxlen=max((rule.steps for rule in self._rules), default=1))
    self._silent: dict[str, int] = {}  # how long each rule that has spoken is silent

  def look(self, metrics: Mapping[str, Any]) -> list[Alarm]:
    """Reads the metrics of the next step; returns the alarms that begin with it."""
    step = defined(metrics)
    self._steps.append(step)
    self.skipped_in_a_row = self.skipped_in_a_row + 1 if was_skipped(step) else 0

    alarms = []
    for rule in self._rules:
      window = list(self._steps)[-rule.steps :]
      text = rule.symptom(window) if len(window) == rule.steps else None
      if text is None:
        self._clear(rule)
        continue
      if rule.name not in self._silent:
        alarms.append(Alarm(rule.name, rule.level, text))
      self._silent[rule.name] = 0
    return alarms

  def _clear(self, rule: Rule) -> None:
    if rule.name in self._silent:
      self._silent[rule.name] += 1
      if self._silent[rule.name] >= max(rule.steps, CLEAR):
        del self._silent[rule.name]


def defined(metrics: Mapping[str, Any]) -> dict[str, float]:
  """Returns the finite scalars among the metrics of a step.

  >>> defined({"entropy": np.float32(0.5), "lag_mean": None, "lag_max": math.nan, "lag_histogram": [1, 2]})
  {'entropy': 0.5}
  """
  scalars = {name: np.asarray(value) for name, value in metrics.items() if value is not None}
  numbers = {name: float(x) for name, x in scalars.items() if x.ndim == 0 and np.issubdtype(x.dtype, np.number)}
  return {name: number for name, number in numbers.items() if math.isfinite(number)}


def was_skipped(step: Mapping[str, float]) -> bool:
  """Tells if an update was left out although there were tokens to train: something was not finite."""
  tokens = step.get("num_trained_tokens", step.get("num_sampled_tokens", 1.0))
  return tokens > 0 and _skipped(step) > 0


def _skipped(step: Mapping[str, float]) -> float:
  return step.get("policy_updates_skipped", 0.0) + step.get("critic_updates_skipped", 0.0)


def _series(steps: Steps, *names: str) -> list[float]:
  """The sums of the named metrics, of the steps that define all of them."""
  return [sum(step[name] for name in names) for step in steps if all(name in step for name in names)]


def _mean(steps: Steps, *names: str) -> float:
  """The mean of what `_series` returns; NaN where less than half of the steps define it."""
  values = _series(steps, *names)
  return statistics.fmean(values) if 2 * len(values) >= len(steps) else math.nan


def _skipped_updates(steps: Steps) -> str | None:
  if not was_skipped(steps[-1]):
    return None
  policy, critic = (steps[-1].get(f"{name}_updates_skipped", 0.0) for name in ("policy", "critic"))
  return (
    f"updates were left out (policy {policy:g}, critic {critic:g}), since a loss, a gradient, a ratio or an advantage "
    "was not finite. training.max_skipped_updates such steps in a row end the run; if it happens again, lower the "
    "learning rates and look at the rewards."
  )


def _nothing_trained(steps: Steps) -> str | None:
  if any(step.get("num_trained_tokens", 1.0) > 0 for step in steps):
    return None
  return (
    f"not one token of the last {len(steps)} batches could be trained on, all of them were masked. Raise "
    "rollout.max_staleness, or set algorithm.truncation='zero'."
  )


def _rejected(low: float, high: float, remedy: str) -> Callable[[Steps], str | None]:
  """Rejected tokens between two shares."""

  def symptom(steps: Steps) -> str | None:
    share = _mean(steps, "rejected_low", "rejected_high")
    if not low < share <= high:
      return None
    return f"{share:.1%} of the tokens of the last {len(steps)} steps left the trust region and train nothing. {remedy}"

  return symptom


def _explained_variance(steps: Steps) -> str | None:
  mean = _mean(steps, "explained_variance")
  if not mean < 0.0:
    return None
  return (
    f"over {len(steps)} steps the critic explains less of the returns than a constant would (explained variance "
    f"{mean:.2g}). Run launch.pretrain_value first or for longer, or raise critic_optimizer.learning_rate or "
    "algorithm.value_updates."
  )


def _gradient_jump(network: str) -> Callable[[Steps], str | None]:
  """A gradient far beyond the median of the steps before it."""

  def symptom(steps: Steps) -> str | None:
    norms, newest = _series(steps[:-1], f"{network}_grad_norm"), steps[-1].get(f"{network}_grad_norm", math.nan)
    median = statistics.median(norms) if 2 * len(norms) >= len(steps) else math.nan
    if not (median > 1e-6 and newest > 10.0 * median):
      return None
    return (
      f"the gradient norm of the {network} jumped to {newest:.3g}, {newest / median:.0f} times its median. It is "
      f"clipped to {network}_optimizer.clip_norm; if it stays there, lower {network}_optimizer.learning_rate."
    )

  return symptom


def _trainer_idle(steps: Steps) -> str | None:
  share = _mean(steps, "trainer_idle_fraction")
  if not share > 0.5:
    return None
  waits = {name: _mean(steps, f"{name}_wait_fraction") for name in ("take", "evaluation", "save", "publish", "compile")}
  known = {name: wait for name, wait in waits.items() if math.isfinite(wait)}
  longest = f", most of it for: {max(known, key=known.get)}" if known else ""
  return (
    f"the trainer waits {share:.0%} of its time{longest}. If it waits to take a batch, more episodes at a time help "
    "(rollout.max_in_flight, sampler.num_slots, rollout.admission_staleness)."
  )


def _skew(steps: Steps) -> str | None:
  ratio = _mean(steps, "used_over_generated_latency")
  # Where nothing is dropped, the two differ by chance, or since episodes grow: those in use are older.
  if not (ratio < 0.9 and any(_series(steps, "dropped_fraction"))):
    return None
  expected = steps[-1].get("expected_used_over_generated_latency")
  expectation = "" if expected is None else f" (an ideal schedule: {expected:.2f})"
  return (
    f"the episodes trained on last only {ratio:.2f} times as long as those generated{expectation}: long ones grow too "
    "old and are dropped. Raise rollout.max_staleness, lower rollout.admission_staleness, or set "
    "rollout.staleness='mask'."
  )


def _equal_rewards(steps: Steps) -> str | None:
  rewards = _series(steps, "reward_mean")
  if len(rewards) < len(steps) or max(rewards) > min(rewards):
    return None
  if any(step.get("num_demonstrations") for step in steps):  # an expert may well succeed at all of them
    return None
  return (
    f"the mean reward was {rewards[0]:g} in each of the last {len(steps)} steps: there is nothing to prefer. Too hard "
    "for the policy: run launch.sft first, name a better model.checkpoint, or begin with easier prompts; too easy: "
    "take harder ones. launch.report shows what the episodes look like."
  )


def _cut_episodes(steps: Steps) -> str | None:
  cut, trajectories = _series(steps, "num_truncated"), _series(steps, "num_trajectories")
  if not (cut and sum(trajectories) > 0 and sum(cut) >= 0.9 * sum(trajectories)):
    return None
  return (
    f"{sum(cut) / sum(trajectories):.0%} of the episodes of the last {len(steps)} steps were cut before their end. "
    "Raise rollout.max_turns, rollout.max_tokens or rollout.max_tokens_per_turn, with sampler.context_length and "
    "rollout.row_lengths; or teach the policy to stop (launch.sft)."
  )


def _entropy(steps: Steps) -> str | None:
  mean = _mean(steps, "entropy")
  if not mean < 0.01:
    return None
  return (
    f"the entropy of the policy is {mean:.2g} nats: it hardly tries anything new. If success does not rise any more, "
    "lower policy_optimizer.learning_rate and begin again from an earlier checkpoint."
  )


RULES = (
  Rule("skipped_updates", 1, "warning", _skipped_updates),
  Rule("nothing_trained", 3, "warning", _nothing_trained),
  Rule(
    "rejected_some",
    20,
    "note",
    _rejected(0.01, 0.07, "More than the paper's 0.6 %: watch it; a smaller rollout.admission_staleness lowers it."),
  ),
  Rule(
    "rejected_many",
    20,
    "warning",
    _rejected(
      0.07,
      1.0,
      "Lower rollout.admission_staleness or policy_optimizer.learning_rate; if delta_logprob_by_lag is not near 0 at "
      "lag 0, sampler and learner disagree.",
    ),
  ),
  Rule("negative_explained_variance", 50, "warning", _explained_variance),
  Rule("policy_gradient_jump", 50, "warning", _gradient_jump("policy")),
  Rule("critic_gradient_jump", 50, "warning", _gradient_jump("critic")),
  Rule("trainer_idle", 20, "note", _trainer_idle),
  Rule("short_episodes_preferred", 20, "warning", _skew),
  Rule("equal_rewards", 20, "warning", _equal_rewards),
  Rule("cut_episodes", 10, "warning", _cut_episodes),
  Rule("low_entropy", 20, "note", _entropy),
)
