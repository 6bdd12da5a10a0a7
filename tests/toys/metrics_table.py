"""The names in the README's table of metrics."""

from __future__ import annotations

import re

from toys.paths import REPOSITORY


def explained_metrics() -> set[str]:
  """Returns the keys that the table explains, some of them patterns like `rollouts_*`."""
  readme = (REPOSITORY / "launch/README.md").read_text(encoding="utf-8")
  section = readme.split("## What the metrics say")[1].split("\n## ")[0]
  cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
  return {key for cell in cells for key in re.findall(r"`([\w*]+)`", cell.replace("` … `", "`, `ratio_*`, `"))}
