"""Measures the held-out success of a policy in a workdir, the newest by default, or runs a published benchmark.

python -m launch.evaluate --workdir=runs/calculator [--phase=sft] [--step=300] [--suite=aime25 --suite_data=DIR]
"""

from __future__ import annotations

import json
from typing import Any

from absl import flags, logging

from launch import _flags, _suites
from sao_jax import interrupt
from sao_jax.config import RunConfig
from sao_jax.configuration import config_tree
from sao_jax.configuration.paths import located
from sao_jax.evaluation import heldout
from sao_jax.learner import sampler_side, setup
from sao_jax.parallel.agreement import all_processes, shared_stop
from sao_jax.report import metrics
from sao_jax.training import phases

_PHASE = flags.DEFINE_enum(
  "phase", "", ["", "base", "sft", "train"], "Whose policy; base: model.checkpoint. By default the newest."
)
_STEP = flags.DEFINE_string("step", "", "Step of a checkpoint that was kept, or best. By default the newest.")
_SUITE = flags.DEFINE_string("suite", "", "A published benchmark, as aime25, in place of the held-out prompts.")


def main(config: RunConfig, workdir: str) -> None:
  """Logs the result and writes it to `workdir/evaluation_<phase>.json`, behind the phase with --step."""
  if _SUITE.value:
    _suites.evaluate(config, workdir, _SUITE.value, _PHASE.value, _STEP.value)
    return
  learner = setup.make_learner(config)
  processes = all_processes()
  with interrupt.Interrupt() as own_stop:
    stop = shared_stop(own_stop, processes)
    policy = phases.latest_policy(config, learner, located(workdir), _PHASE.value, _STEP.value)
    version, phase = policy.version, policy.phase
    weights = sampler_side.make_publisher(learner)(policy.params)
    share = heldout.evaluate(config, weights, version, stop, share=learner.share)
    result = heldout.merged(config, processes, share, lambda: stop.requested)

  logging.info("%s, version %d: held-out success %s", phase, version, result)
  record = {"phase": phase, "policy_version": version} | _origin(config, policy.checkpoint) | result.metrics()
  path = located(workdir) / f"evaluation_{phase}{f'_{policy.step}' if _STEP.value else ''}.json"
  if processes.is_writer:
    path.write_text(json.dumps(metrics.to_json(record), indent=2, allow_nan=False) + "\n", encoding="utf-8")

  # No result is no success, for a script that goes on with it: status 1.
  if not result.success.trials:
    skipped = f"each of the {result.skipped} prompts was skipped; the log says why. Mend the prompts"
    failed = f"each of the {result.ungraded} episodes failed; the log says why. Mend the environment"
    empty = "the held-out split has no prompts. Give the environment some"
    reason = failed if result.ungraded else skipped if result.skipped else empty
    raise SystemExit(f"error: nothing could be graded: {reason}, and evaluate again.")


def _origin(config: RunConfig, checkpoint: str) -> dict[str, Any]:
  """The policy that was measured, and on what: a rate says nothing without them."""
  settings = config.evaluation
  return {
    "checkpoint": checkpoint,
    "config": {"name": config.name, "environment": config_tree.to_json(config.environment)},
    "seed": config.training.seed,
    "prompts": {"split": "heldout", "seed": settings.seed, "at_most": settings.prompts},
    "temperature": settings.temperature,
  }


if __name__ == "__main__":
  _flags.run(main, writes=False, needs_run=False)
