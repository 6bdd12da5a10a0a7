"""Bars over the tokens of a trajectory stand on the sampled ones, and the others are shaded."""

from __future__ import annotations

import numpy as np
import pytest

from sao_jax.report.style import BLUE, ORANGE, STYLE
from sao_jax.report.token_bars import draw_token_bars

matplotlib = pytest.importorskip("matplotlib")

SAMPLED = np.array([False, True, True, False, False, True, False])
VALUES = np.array([np.nan, 0.5, -0.25, 9.0, np.inf, 1.0, 3.0])


@pytest.fixture
def axes():
  from matplotlib.figure import Figure

  with matplotlib.rc_context(STYLE):
    yield Figure().add_subplot()


def test_bars_stand_on_sampled_tokens_alone(axes):
  draw_token_bars(axes, VALUES, SAMPLED)
  bars = {round(bar.get_x() + bar.get_width() / 2): bar for bar in axes.containers[0]}
  assert {place: bar.get_height() for place, bar in bars.items()} == {1: 0.5, 2: -0.25, 5: 1.0}
  colors = {place: matplotlib.colors.to_hex(bar.get_facecolor()).upper() for place, bar in bars.items()}
  assert colors == {1: BLUE, 2: ORANGE, 5: BLUE}
  assert axes.get_xlim() == (-0.5, 6.5)


def test_runs_of_other_tokens_are_shaded(axes):
  draw_token_bars(axes, VALUES, SAMPLED)
  spans = [patch for patch in axes.patches if patch not in axes.containers[0].patches]
  assert [(span.get_x(), span.get_x() + span.get_width()) for span in spans] == [(-0.5, 0.5), (2.5, 4.5), (5.5, 6.5)]


def test_texts_of_the_tokens_stand_under_them(axes):
  draw_token_bars(axes, VALUES, SAMPLED, texts=list("abcdefg"))
  assert [label.get_text() for label in axes.get_xticklabels()] == list("abcdefg")
