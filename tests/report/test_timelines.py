"""Spans lie where they are said to, in free lanes; tokens have the colour of their version."""

from __future__ import annotations

import numpy as np
import pytest

from sao_jax.report.style import BLUE, ORANGE, STYLE
from sao_jax.report.timelines import NOT_SAMPLED, Span, draw_spans, draw_token_versions, free_lanes, version_colors

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def axes():
  from matplotlib.figure import Figure

  with matplotlib.rc_context(STYLE):
    yield Figure().add_subplot()


def bars(axes):
  """(lane, begin, end) of all bars, by colour."""
  found = {}
  for patch in axes.patches:
    lane = round(patch.get_y() + patch.get_height() / 2)
    place = (lane, float(patch.get_x()), float(patch.get_x() + patch.get_width()))
    found.setdefault(matplotlib.colors.to_hex(patch.get_facecolor()).upper(), []).append(place)
  return found


def test_spans_lie_in_their_lanes_in_the_colours_of_their_kinds(axes):
  spans = [Span(0, 0, 2, "decode"), Span(1, 1, 4, "wait", "B"), Span(0, 2, 2.5, "wait"), Span(1, 4, 5, "decode")]
  draw_spans(axes, spans, {"decode": BLUE, "prefill": "#123456", "wait": ORANGE})
  assert bars(axes) == {BLUE: [(0, 0, 2), (1, 4, 5)], ORANGE: [(1, 1, 4), (0, 2, 2.5)]}
  assert axes.get_legend_handles_labels()[1] == ["decode", "wait"]  # no bar, no name
  assert [text.get_text() for text in axes.texts] == ["B"]
  assert axes.get_ylim() == (1.5, -0.5)  # lane 0 at the top


def test_lanes_are_as_many_as_are_ever_busy_and_never_shared_by_two():
  rng = np.random.default_rng(0)
  begins = rng.uniform(0, 50, 200)
  ends = begins + rng.lognormal(0, 1, 200)
  lanes = np.array(free_lanes(begins, ends))
  for lane in range(lanes.max() + 1):
    own = np.flatnonzero(lanes == lane)
    own = own[np.argsort(begins[own])]
    assert np.all(ends[own][:-1] <= begins[own][1:])
  assert lanes.max() + 1 == max(np.sum((begins <= begin) & (begin < ends)) for begin in begins)


def test_a_lane_that_ends_as_another_span_begins_is_free():
  assert free_lanes([0, 1], [1, 2]) == [0, 0]
  assert free_lanes([], []) == []


def test_tokens_have_the_colour_of_the_version_that_sampled_them(axes):
  draw_token_versions(axes, [np.array([-1, -1, 3, 3, -1, 5]), np.array([-1, 5, 5])])
  colors = version_colors([3, 5])
  assert bars(axes) == {
    NOT_SAMPLED.upper(): [(0, 0, 2), (0, 4, 5), (1, 0, 1)],
    colors[3].upper(): [(0, 2, 4)],
    colors[5].upper(): [(0, 5, 6), (1, 1, 3)],
  }
  assert axes.get_legend_handles_labels()[1] == ["not sampled", "version 3", "version 5"]


def test_versions_grow_lighter():
  colors = version_colors([7, 2, 4, 2])
  light = [sum(matplotlib.colors.to_rgb(colors[version])) for version in (2, 4, 7)]
  assert list(colors) == [2, 4, 7]
  assert light == sorted(light)
  assert list(version_colors([9])) == [9]
  assert version_colors([]) == {}
