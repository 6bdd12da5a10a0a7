"""The tokens of a trajectory as a picture: a bar for each sampled one, and the observations between them in grey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from sao_jax.report.style import BLUE, GREY, ORANGE


def draw_token_bars(
  axes: Any,
  values: Float[np.ndarray, "T"],
  sampled: Bool[np.ndarray, "T"],
  texts: Sequence[str] | None = None,
) -> None:
  """Draws a value for each sampled token, upwards and blue where it is positive, downwards and orange where negative.

  Args:
    axes: matplotlib axes.
    values: anything may stand on tokens that were not sampled.
    sampled: True on sampled tokens; the others are shaded.
    texts: of the tokens, under the axis; None leaves their numbers there.
  """
  values, sampled = np.asarray(values, np.float64), np.asarray(sampled, bool)
  where = np.flatnonzero(sampled)
  axes.bar(where, values[where], color=np.where(values[where] < 0, ORANGE, BLUE), width=0.8)

  # Everything that was not sampled, run by run.
  edges = np.flatnonzero(np.diff(np.concatenate([[0], ~sampled, [0]]).astype(np.int8)))
  for begin, end in edges.reshape(-1, 2):
    axes.axvspan(begin - 0.5, end - 0.5, color=GREY, alpha=0.15, linewidth=0)

  # Zero is a line of its own: a bar of height 0 is none.
  axes.axhline(0, color=GREY, linewidth=0.8)
  axes.set_xlim(-0.5, len(values) - 0.5)
  axes.grid(axis="x", visible=False)
  if texts is not None:
    axes.set_xticks(range(len(texts)), texts, rotation=90, fontsize=8, family="monospace")
