"""Timelines as pictures: coloured spans in lanes, and tokens coloured by the policy version that sampled them."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

NOT_SAMPLED = "#d1d5db"  # of tokens that no policy version has sampled
_DARKEST, _LIGHTEST = 0.05, 0.92  # of the colour map: its ends are hard to tell from black and white


class Span(NamedTuple):
  """Something that lasts: from `begin` to `end` in a lane, such as a slot of the sampler.

  Attributes:
    lane: its row of the picture, counted from the top.
    begin: where it starts, in any unit.
    end: where it ends.
    kind: decides its colour; the legend shows its name.
    text: written at its beginning.
  """

  lane: int
  begin: float
  end: float
  kind: Hashable
  text: str = ""


def draw_spans(axes: Any, spans: Iterable[Span], colors: Mapping[Hashable, str], *, height: float = 0.8) -> None:
  """Draws spans as bars, lane 0 at the top, and names each kind once for the legend, in the order of `colors`.

  Args:
    axes: matplotlib axes.
    spans: those of a lane may follow each other in any order; later kinds of `colors` cover earlier ones.
    colors: of every kind.
    height: of a bar, as a share of its lane.
  """
  spans = list(spans)
  for kind, color in colors.items():
    own = [span for span in spans if span.kind == kind]
    if own:
      lanes, begins = [span.lane for span in own], np.array([span.begin for span in own], np.float64)
      widths = np.array([span.end for span in own], np.float64) - begins
      axes.barh(lanes, widths, left=begins, height=height, color=color, linewidth=0, label=str(kind))

  # Text stands on its span, in white: colours of spans are meant to be dark enough.
  for span in spans:
    if span.text:
      options = {"ha": "left", "va": "center", "fontsize": 8, "color": "white", "clip_on": True}
      axes.annotate(span.text, (span.begin, span.lane), (2, 0), textcoords="offset points", **options)

  # One tick for each lane, the first one at the top.
  lanes = 1 + max((span.lane for span in spans), default=0)
  axes.set_ylim(lanes - 0.5, -0.5)
  axes.yaxis.get_major_locator().set_params(integer=True)
  axes.grid(axis="y", visible=False)


def free_lanes(begins: Sequence[float], ends: Sequence[float]) -> list[int]:
  """Returns a lane for each span, the lowest that is free as it begins: as many lanes as ever are busy at once.

  >>> free_lanes([0, 1, 2, 5], [4, 2, 6, 7])
  [0, 1, 1, 0]
  """
  busy: list[tuple[float, int]] = []  # (end, lane), a heap
  free: list[int] = []  # a heap
  lanes = [0] * len(begins)
  for index in np.argsort(begins, kind="stable"):
    while busy and busy[0][0] <= begins[index]:
      heapq.heappush(free, heapq.heappop(busy)[1])
    lanes[index] = heapq.heappop(free) if free else len(busy)
    heapq.heappush(busy, (ends[index], lanes[index]))
  return lanes


def version_colors(versions: Iterable[int]) -> dict[int, str]:
  """Maps policy versions to colours, from dark for the oldest to light for the newest one."""
  from matplotlib import colormaps, colors  # an optional extra

  ordered = sorted(set(versions))
  places = np.linspace(_DARKEST, _LIGHTEST, len(ordered)) if len(ordered) > 1 else [_DARKEST]
  return {version: colors.to_hex(colormaps["viridis"](place)) for version, place in zip(ordered, places)}


def draw_token_versions(
  axes: Any, trajectories: Sequence[Int[np.ndarray, " T"]], colors: Mapping[int, str] | None = None
) -> None:
  """Draws a row of tokens for each trajectory, coloured by the version that sampled them, grey where none did.

  Args:
    axes: matplotlib axes.
    trajectories: `Trajectory.policy_version` of each: -1 on tokens of prompts and observations.
    colors: of every version; None takes `version_colors` of those that occur.
  """
  versions = [np.asarray(each, np.int64) for each in trajectories]
  if colors is None:
    colors = version_colors(version for each in versions for version in each.tolist() if version >= 0)
  names = {-1: "not sampled"} | {version: f"version {version}" for version in colors}
  by_name = {names[version]: color for version, color in ({-1: NOT_SAMPLED} | dict(colors)).items()}

  # A run of tokens of one version is one bar.
  spans = []
  for lane, each in enumerate(versions):
    edges = np.flatnonzero(np.diff(each, prepend=-2, append=-2))
    spans += [Span(lane, begin, end, names[int(each[begin])]) for begin, end in zip(edges, edges[1:])]
  draw_spans(axes, spans, by_name)
  axes.set_xlabel("token")
