"""A study whose launchers only write what runs leave."""

from __future__ import annotations

import threading

from sao_jax.configuration.methods import METHODS
from sao_jax.report.metrics import MetricsWriter
from sao_jax.study.plan import Study
from sao_jax.study.study_runs import FOLDERS
from toys.paths import REPOSITORY

NO_STUDIES = ("__init__", "claims", "shared")
SUITES = sorted(path for path in (REPOSITORY / "configs/studies").glob("*.py") if path.stem not in NO_STUDIES)

STUDY = Study(
  name="toy",
  question="Does it learn?",
  config="configs/calculator.py",
  variants={"sao": {}, "grpo": METHODS["grpo"]},
  seeds=(0, 1, 2),
  fields={"training.steps": 4},
)


def write_run(workdir, level: float, steps: int = 4) -> None:
  """Metrics as a training run leaves them."""
  numbers = {"num_sampled_tokens": 100.0, "num_tokens": 150.0, "num_trajectories": 8.0, "step_seconds": 0.5}
  numbers |= {"lag_mean": 2.0, "rejected_low": 0.01, "rejected_high": 0.02, "response_length_mean": 9.0}
  with MetricsWriter(workdir, "train", trackers=()) as writer:
    for step in range(1, steps + 1):
      own = {"seconds": step / 2, "policy_version": step, "explained_variance": level * step / steps}
      writer.write(step, numbers | own)
    writer.write(steps, {"heldout_success": level, "policy_version": steps})


class FakeLaunch:
  """Launchers that write what a run leaves, and may fail."""

  def __init__(self, fails=()):
    self.calls, self.fails, self.lock = [], set(fails), threading.Lock()

  def __call__(self, arguments, log):
    program, *rest = arguments
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in rest)
    with self.lock:
      self.calls.append((program, flags))
    if program in self.fails or flags["workdir"] in self.fails:
      return 3
    folder = log.parent
    if program == "launch.train":
      assert (folder / "sft").exists(), "the start of its seed"
      assert (folder / "value_pretraining").exists() == ("cold" not in folder.parent.name)
      write_run(folder, 0.5 + 0.1 * int(flags["seed"]) + 0.2 * (flags.get("config.algorithm.advantage") == "grpo"))
    else:
      (folder / FOLDERS[program.removeprefix("launch.")]).mkdir()
    return 0
