"""The report of a run: curves as PNG files, and one self-contained HTML page with the curves and three episodes.

Everything is read from the working directory (metrics.jsonl, episodes.jsonl, config.json). A report can therefore be
drawn while the run goes on, on another machine, or for a run that was cut short.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.configuration.paths import in_bucket, located
from sao_jax.errors import ConfigError
from sao_jax.report.curves import PANELS, figure
from sao_jax.report.line_file import LineFile
from sao_jax.report.metrics import metric_lines, to_json, valid_lines
from sao_jax.report.thinning import ALARMS, thinned

EPISODES_FILE = "episodes.jsonl"
REPORT_DIRECTORY = "report"
TEMPLATE = pathlib.Path(__file__).with_name("report.html")

# All that a report reads of a metric line.
DRAWN = {"step", "policy_version", "lag_mean", "heldout_low", "heldout_high", "sampler_waiting_fraction", ALARMS}
DRAWN |= {name for panel in PANELS for name in panel.needs}

# Control characters would be invisible (or break the layout): U+2400 shows a picture of each.
_VISIBLE_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "\u2421"}


def write_report(workdir: str | os.PathLike, phase: str = "train") -> list[pathlib.Path]:
  """Writes `workdir/report/index.html` and one PNG per panel; returns their paths, the page first.

  A metric that was not recorded leaves a panel that says so.

  Raises:
    ConfigError: when there is nothing at all to report, or a package of the `report` extra is missing.
  """
  workdir = located(os.path.expanduser(workdir))
  lines = thinned(metric_lines(workdir, phase), DRAWN)
  episodes = read_episodes(workdir, phase)
  if not lines and not episodes:
    raise ConfigError(
      "workdir",
      f"{workdir} holds no metrics of a {phase} phase and no episodes of it, so there is nothing to report.",
      "Name the --workdir of a run that has made at least one train step.",
    )

  # Draw everything before the first file is written: a missing package leaves no half of a report.
  images = _draw(lines)
  directory = workdir / REPORT_DIRECTORY
  directory.mkdir(exist_ok=True)
  paths = []
  for panel in PANELS:
    path = directory / f"{panel.name}.png"
    path.write_bytes(images[panel.name])
    paths.append(path)

  page = directory / "index.html"
  page.write_text(_page(workdir, lines, pick_episodes(episodes), images), encoding="utf-8")
  return [page, *paths]


def append_episode(
  workdir: str | os.PathLike, phase: str, step: int, reward: float, status: str, segments: Sequence[tuple[str, str]]
) -> None:
  """Appends one episode to the record.

  Args:
    workdir: the run's directory.
    phase: the phase to which the episode belongs.
    step: number of train steps done when the episode was chosen.
    reward: the episode's return.
    status: the way in which the episode ended, a value of `Status`.
    segments: (kind, text) in order; kind is "prompt", "action" or "observation".
  """
  episode = {
    "step": int(step),
    "phase": phase,
    "reward": to_json(reward),
    "status": status,
    "segments": [{"kind": kind, "text": text} for kind, text in segments],
  }
  file = LineFile(pathlib.Path(workdir) / EPISODES_FILE)
  file.append(episode)
  file.close()


def read_episodes(workdir: str | os.PathLike, phase: str | None = None) -> list[dict[str, Any]]:
  """Returns the recorded episodes (of one `phase`) in order; [] without a file. A torn line is left out."""
  lines = valid_lines(located(workdir) / EPISODES_FILE)
  episodes = [line for line in lines if isinstance(line.get("segments"), list)]
  # Lines of earlier versions name no phase.
  return [episode for episode in episodes if phase is None or episode.get("phase", phase) == phase]


def pick_episodes(episodes: Sequence[dict[str, Any]], count: int = 3) -> list[dict[str, Any]]:
  """Chooses `count` episodes evenly over the run, the first and the last included."""
  if len(episodes) <= count:
    return list(episodes)
  return [episodes[round(i * (len(episodes) - 1) / (count - 1))] for i in range(count)]


def _draw(lines: Sequence[dict[str, Any]]) -> dict[str, bytes]:
  """Draws all panels; returns their PNG files by name."""
  images = {}
  for panel in PANELS:
    buffer = io.BytesIO()
    try:
      figure(panel, lines).savefig(buffer, format="png")
    except ImportError as error:
      raise _missing_extra("matplotlib") from error
    images[panel.name] = buffer.getvalue()
  return images


def _page(
  workdir: pathlib.Path,
  lines: Sequence[dict[str, Any]],
  episodes: Sequence[dict[str, Any]],
  images: Mapping[str, bytes],
) -> str:
  """Renders the HTML page, with the images inside it."""
  try:
    import jinja2  # an optional extra
  except ImportError as error:
    raise _missing_extra("jinja2") from error

  # Without a config.json the directory's name is the heading, and the page shows no configuration.
  config_path = workdir / "config.json"
  config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}

  # Episodes hold text of a policy: it is escaped, and its control characters are made visible.
  environment = jinja2.Environment(
    autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
  )
  environment.filters["visible"] = lambda text: str(text).translate(_VISIBLE_CONTROLS)

  return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
    name=config.get("name") or (workdir if in_bucket(workdir) else workdir.resolve()).name,
    facts=_facts(lines),
    alarms=_alarms(lines),
    panels=[(panel, base64.b64encode(images[panel.name]).decode("ascii")) for panel in PANELS],
    episodes=episodes,
    config=json.dumps(config, indent=2) if config else "",
  )


def _facts(lines: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
  """Lists the numbers at the top of the page as (label, value, note), without those that were not recorded."""
  facts = [("train steps", str(lines[-1]["step"]), "")] if lines else []
  if versions := _values(lines, "policy_version"):
    facts.append(("policy version", f"{versions[-1]:.0f}", ""))

  # Held-out success at the first evaluation and at the last one.
  evaluated = [line for line in lines if line.get("heldout_success") is not None]
  for line in evaluated[:1] + evaluated[1:][-1:]:
    known = line.get("heldout_low") is not None and line.get("heldout_high") is not None
    interval = f"{line['heldout_low']:.1%} – {line['heldout_high']:.1%}" if known else ""
    facts.append((f"held-out success, step {line['step']}", f"{line['heldout_success']:.1%}", interval))

  # Means over all steps.
  for key, label, form in (
    ("lag_mean", "mean lag", "{:.2f}"),
    ("rejected_low", "rejected, ratio too low", "{:.2%}"),
    ("rejected_high", "rejected, ratio too high", "{:.2%}"),
  ):
    if values := _values(lines, key):
      facts.append((label, form.format(statistics.fmean(values)), "mean over steps"))
  return facts


def _alarms(lines: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
  """Lists what the health rules said, with the steps at which they began to."""
  return [(line["step"], text) for line in lines for text in line.get(ALARMS) or ()]


def _values(lines: Sequence[dict[str, Any]], key: str) -> list[float]:
  return [line[key] for line in lines if line.get(key) is not None]


def _missing_extra(package: str) -> ConfigError:
  return ConfigError("report", f"{package} is not installed; the report needs it.", "Run: pip install -e '.[report]'")
