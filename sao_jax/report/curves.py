"""The curves of a run as matplotlib figures: one function per panel, from metric lines to axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from sao_jax.algorithm.diagnostics import LAG_BINS
from sao_jax.report.style import BLUE, GREEN, GREY, ORANGE, STYLE

Lines = Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Panel:
  """One figure of the report.

  Attributes:
    name: stem of the file's name.
    title: heading, above the axes.
    caption: one sentence that says how to read the figure.
    needs: metrics, at least one of which must be present.
    draw: function that draws the metric lines into matplotlib axes.
  """

  name: str
  title: str
  caption: str
  needs: tuple[str, ...]
  draw: Callable[[Any, Lines], None]


def figure(panel: Panel, lines: Lines) -> Any:
  """Draws `panel` as a matplotlib Figure; when none of its metrics was recorded, the figure says so."""
  import matplotlib  # an optional extra
  from matplotlib.figure import Figure

  # A figure without pyplot: there is no window, and nothing to close.
  with matplotlib.rc_context(STYLE):
    result = Figure(figsize=(6.0, 3.4), dpi=150, layout="constrained")
    axes = result.add_subplot()
    axes.set_title(panel.title)
    if any(_series(lines, key)[1].size for key in panel.needs):
      panel.draw(axes, lines)
    else:
      axes.set_axis_off()
      text = f"not recorded in this run yet\n({', '.join(panel.needs)})"
      axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
  return result


def smooth(values: Float[np.ndarray, " N"], window: int) -> Float[np.ndarray, " N"]:
  """Computes the centred moving average over `window` (odd) values; at the ends, over the values that exist."""
  index = np.arange(len(values), dtype=np.int64)
  begin, end = np.maximum(index - window // 2, 0), np.minimum(index + window // 2 + 1, len(values))
  sums = np.concatenate([np.zeros(1, np.float64), np.cumsum(values, dtype=np.float64)])
  return (sums[end] - sums[begin]) / (end - begin)


def _series(lines: Lines, key: str) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
  """Returns the steps and finite values of a scalar metric, or the sums of a vector: is there anything to draw?"""
  steps, values = [], []
  for line in lines:
    value = line.get(key)
    if isinstance(value, list):
      value = sum(item or 0 for item in value) if value else None
    if value is not None and math.isfinite(value):
      steps.append(line["step"])
      values.append(value)
  return np.asarray(steps, np.float64), np.asarray(values, np.float64)


def _curve(axes: Any, lines: Lines, key: str, label: str, color: str, scale: float = 1.0) -> None:
  """Draws the raw values in the background and their moving average in front."""
  steps, values = _series(lines, key)
  if not steps.size:
    return
  values = values * scale
  window = 2 * (len(lines) // 40) + 1
  if window == 1:
    axes.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=3, label=label)
    return
  axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
  axes.plot(steps, smooth(values, window), color=color, linewidth=1.8, label=f"{label} (mean of {window} steps)")


def _finish(axes: Any, ylabel: str) -> None:
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.set_xlabel("train step")
  axes.set_ylabel(ylabel)
  axes.legend(loc="best")


def _reward(axes: Any, lines: Lines) -> None:
  _curve(axes, lines, "reward_mean", "reward", BLUE)
  _finish(axes, "mean reward of the batch")


def _success(axes: Any, lines: Lines) -> None:
  # A line without an interval gets a bar of length 0.
  steps, rate = _series(lines, "heldout_success")
  measured = [line for line in lines if line.get("heldout_success") is not None]
  low = np.asarray([line.get("heldout_low", line["heldout_success"]) for line in measured], np.float64)
  high = np.asarray([line.get("heldout_high", line["heldout_success"]) for line in measured], np.float64)

  # A step measured twice (evaluation repeated after a resume) keeps its order; the bars show both.
  bars = 100 * np.maximum(np.stack([rate - low, high - rate]), 0)
  axes.errorbar(
    steps,
    100 * rate,
    yerr=bars,
    color=GREEN,
    linewidth=1.8,
    marker="o",
    markersize=4,
    capsize=3,
    label="held-out success",
  )
  axes.set_ylim(0, 102)
  _finish(axes, "episodes solved (%)")


def _rejected(axes: Any, lines: Lines) -> None:
  _curve(axes, lines, "rejected_low", "ratio too low", BLUE, 100)
  _curve(axes, lines, "rejected_high", "ratio too high", ORANGE, 100)
  axes.set_ylim(bottom=0)
  _finish(axes, "sampled tokens rejected (%)")


def _lag(axes: Any, lines: Lines) -> None:
  # Tokens by lag over the whole run; the files of earlier versions have one bin a lag.
  histograms = [line["lag_histogram"] for line in lines if line.get("lag_histogram")]
  tokens = np.zeros(max(len(histogram) for histogram in histograms), np.float64)
  for histogram in histograms:
    tokens[: len(histogram)] += [count or 0 for count in histogram]
  names = lag_bin_names() if len(tokens) == len(LAG_BINS) else [str(lag) for lag in range(len(tokens))]

  # Empty bins at the end are left out.
  last = int(np.flatnonzero(tokens).max(initial=0))
  share = 100 * tokens[: last + 1] / max(tokens.sum(), 1)
  _, means = _series(lines, "lag_mean")
  label = "all steps" + (f", mean lag {means.mean():.2f}" if means.size else "")
  axes.bar(names[: last + 1], share, color=BLUE, width=0.8, label=label)
  axes.grid(axis="x", visible=False)
  axes.set_xlabel("lag when trained (policy versions)")
  axes.set_ylabel("sampled tokens (%)")
  axes.legend(loc="best")


def lag_bin_names() -> list[str]:
  """Names the bins of the metrics by lag, as in "7", "8–15" and "1024+".

  >>> lag_bin_names()[7:10]
  ['7', '8–15', '16–31']
  """
  ends = zip(LAG_BINS, LAG_BINS[1:])
  return [str(low) if low == end - 1 else f"{low}–{end - 1}" for low, end in ends] + [f"{LAG_BINS[-1]}+"]


def _explained_variance(axes: Any, lines: Lines) -> None:
  _curve(axes, lines, "explained_variance", "critic", BLUE)
  axes.axhline(0, color=GREY, linewidth=1, linestyle="--", label="predicting the mean")
  _, values = _series(lines, "explained_variance")
  # A new critic starts far below zero; the part that matters is between -1 and 1.
  axes.set_ylim(max(float(values.min()) - 0.05, -1.0), 1.0)
  _finish(axes, "explained variance of returns")


def _gradients(axes: Any, lines: Lines) -> None:
  from matplotlib import ticker  # an optional extra

  _curve(axes, lines, "policy_grad_norm", "policy", BLUE)
  _curve(axes, lines, "critic_grad_norm", "critic", ORANGE)
  positive = [
    value for key in ("policy_grad_norm", "critic_grad_norm") for value in _series(lines, key)[1] if value > 0
  ]
  if positive and max(positive) > 20 * min(positive):
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
  _finish(axes, "gradient norm before clipping")


def _idle(axes: Any, lines: Lines) -> None:
  _curve(axes, lines, "trainer_idle_fraction", "trainer waits", BLUE, 100)
  _curve(axes, lines, "place_idle_fraction", "rollout places without an episode", ORANGE, 100)
  _curve(axes, lines, "sampler_free_fraction", "sampler slots without an episode", GREEN, 100)
  _curve(axes, lines, "sampler_waiting_fraction", "sampler slots that wait for an environment", GREY, 100)
  axes.set_ylim(0, 102)
  _finish(axes, "idle share (%)")


def _length(axes: Any, lines: Lines) -> None:
  _curve(axes, lines, "response_length_mean", "sampled tokens", BLUE)
  axes.set_ylim(bottom=0)
  _finish(axes, "sampled tokens per episode")


PANELS = (
  Panel("reward", "Reward", "Mean reward of the trajectories of each train step.", ("reward_mean",), _reward),
  Panel(
    "heldout_success",
    "Held-out success",
    "Share of held-out prompts solved at one policy version, with its confidence interval.",
    ("heldout_success",),
    _success,
  ),
  Panel(
    "rejected_fraction",
    "Rejected tokens",
    "Sampled tokens whose importance ratio fell outside the trust region; they get no policy gradient.",
    ("rejected_low", "rejected_high"),
    _rejected,
  ),
  Panel(
    "lag",
    "Policy lag",
    "How many policy updates lie between the weights that sampled a token and the weights it trains.",
    ("lag_histogram",),
    _lag,
  ),
  Panel(
    "explained_variance",
    "Explained variance",
    "1 − Var(return − value) / Var(return) over sampled tokens, before the critic's update.",
    ("explained_variance",),
    _explained_variance,
  ),
  Panel(
    "gradient_norms",
    "Gradient norms",
    "Global norms of both networks before clipping.",
    ("policy_grad_norm", "critic_grad_norm"),
    _gradients,
  ),
  Panel(
    "idle_fractions",
    "Idle time",
    "Where an asynchronous run loses time: a starved trainer or empty sampler slots.",
    ("trainer_idle_fraction", "place_idle_fraction", "sampler_free_fraction"),
    _idle,
  ),
  Panel(
    "response_length",
    "Response length",
    "Mean number of tokens that the policy sampled per episode.",
    ("response_length_mean",),
    _length,
  ),
)
