"""The look of all pictures, for reports and notebooks: `matplotlib.rc_context(STYLE)` or `plt.style.use(STYLE)`."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's palette: distinguishable with every common colour vision.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6b7280"

STYLE: dict[str, Any] = {
  "font.size": 10,
  "axes.titlesize": 11,
  "axes.titleweight": "bold",
  "axes.titlelocation": "left",
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.edgecolor": GREY,
  "axes.grid": True,
  "grid.color": "#e5e7eb",
  "grid.linewidth": 0.8,
  "axes.axisbelow": True,
  "legend.frameon": False,
  "legend.fontsize": 9,
}
