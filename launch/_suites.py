"""The part of launch.evaluate that runs a published benchmark, see sao_jax/evaluation/suite.py."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags, logging

from sao_jax import interrupt
from sao_jax.config import RunConfig
from sao_jax.configuration.paths import expand
from sao_jax.configuration.relations import validate
from sao_jax.errors import ConfigError
from sao_jax.evaluation import suite_environment, swe_bench
from sao_jax.evaluation.suite import find_suite
from sao_jax.evaluation.suite_data import SuiteData, find_data
from sao_jax.evaluation.suite_episodes import SuiteEpisode
from sao_jax.evaluation.suite_result import summarize
from sao_jax.evaluation.suite_run import identity_of, run_suite
from sao_jax.learner import sampler_side, setup
from sao_jax.parallel.agreement import all_processes, shared_stop
from sao_jax.parallel.params import checksum
from sao_jax.report import metrics
from sao_jax.training import phases

_DATA = flags.DEFINE_string("suite_data", "", "Of --suite: a file of it, or the folder to which it was downloaded.")
_TOOLS = flags.DEFINE_enum("tools", suite_environment.TOOLS[0], suite_environment.TOOLS, "Of --suite: the tools.")
_RUNS = flags.DEFINE_integer("runs", None, "Of --suite: episodes of each problem, in place of its own.", lower_bound=1)
_PROBLEMS = flags.DEFINE_integer("problems", None, "Of --suite: only the first so many.", lower_bound=1)
_JUDGE = flags.DEFINE_string("judge", "", "Of --suite: an OpenAI-compatible endpoint that grades the answers.")
_JUDGE_MODEL = flags.DEFINE_string("judge_model", "", "Name of the model there.")
_JUDGE_KEY = flags.DEFINE_string("judge_key_variable", "", "Environment variable with the key, if one is needed.")


def evaluate(config: RunConfig, workdir: str, name: str, phase: str, step: str) -> None:
  """Runs what is missing of a suite; prints the result, and writes it to `workdir/suite_<name>_<step>.json`.

  The episodes are kept in the folder of that name, so that the same command goes on after a kill. The step of a policy
  that RL has not trained has the phase before it, as in sft_300.
  """
  # Bad input is refused before a checkpoint is read.
  suite = find_suite(name)
  data = find_data(suite, _DATA.value)
  config = suite_environment.suite_config(config, suite, data, tools=_TOOLS.value, judge=_judge())
  validate(config, training=False)
  learner, processes, root = setup.make_learner(config), all_processes(), expand(workdir)
  runs = _RUNS.value or suite.runs

  with interrupt.Interrupt() as own_stop:
    stop = shared_stop(own_stop, processes)
    policy = phases.latest_policy(config, learner, root, phase, step)
    label = "_".join(part for part in (policy.phase, str(policy.step or "")) if part not in ("", phases.TRAIN))
    folder = root / f"suite_{suite.name}_{label}"

    # A run that was begun anew comes to the same steps with other weights.
    identity = policy.identity | {"weights": checksum(policy.params)}
    episodes = run_suite(
      config,
      sampler_side.make_publisher(learner)(policy.params),
      policy.version,
      folder,
      identity_of(config, suite, data, identity),
      runs=runs,
      processes=processes,
      share=learner.share,
      problems=_PROBLEMS.value,
      interrupt=stop,
    )
  if episodes is None:  # another process writes the result
    return

  # The table for people, the numbers for programs.
  if suite.kind == "repositories":
    episodes = _scored(data, folder, episodes, runs, f"{config.name}-{label}")
  result = summarize(suite, episodes, runs, threshold=config.evaluation.success_threshold)
  sys.stdout.write(f"{policy.checkpoint}, version {policy.version}\n{result.table()}\n")
  tools = _TOOLS.value if suite.kind == "questions" else "repository"
  record = identity | {"checkpoint": policy.checkpoint, "tools": tools, "judge": _JUDGE_MODEL.value or None}
  path = folder.with_name(f"{folder.name}.json")
  text = json.dumps(metrics.to_json(record | result.record()), indent=2, allow_nan=False)
  path.write_text(f"{text}\n", encoding="utf-8")
  logging.info("The result is in %s, the episodes are in %s.", path, folder)
  if not result.graded:
    raise SystemExit(f"error: no episode could be graded; {folder} says why of each.")


def _scored(
  data: SuiteData, folder: pathlib.Path, episodes: Sequence[SuiteEpisode], runs: int, model: str
) -> list[SuiteEpisode]:
  """Writes the predictions of each run, and has them scored where that is possible; returns the episodes with it."""
  scored, dataset = [], swe_bench.dataset_of(data)
  for run in range(runs):
    own, path = [each for each in episodes if each.run == run], folder / f"predictions.{run}.jsonl"
    count = swe_bench.write_predictions(path, own, model)
    logging.info("%d predictions are in %s.", count, path)
    report = swe_bench.official_score(path, model, f"{folder.name}_{run}", dataset=dataset)
    scored += swe_bench.with_score(own, report)
  return scored


def _judge() -> Any:
  """Makes the judge that the flags name; None without one."""
  if not _JUDGE.value:
    return None
  if not _JUDGE_MODEL.value:
    raise ConfigError("--judge_model", "it is missing beside --judge.", "Name the model that judges.")
  return suite_environment.equality_judge(_JUDGE.value, _JUDGE_MODEL.value, _JUDGE_KEY.value)
