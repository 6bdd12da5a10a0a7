"""Compares the critic of a run with an oracle: the mean return of each state, which the environment's task tells.

python -m launch.oracle --workdir=runs/corridor [--phase=value_pretraining] [--trajectories=2000]
"""

from __future__ import annotations

import json

from absl import flags, logging

from launch import _flags
from sao_jax.config import RunConfig
from sao_jax.configuration.paths import located
from sao_jax.report import metrics
from sao_jax.study.critic_check import check_critic

_PHASE = flags.DEFINE_enum("phase", "train", ["value_pretraining", "train"], "Whose policy and critic.")
_TRAJECTORIES = flags.DEFINE_integer("trajectories", 2000, "Episodes to sample.", lower_bound=2)


def main(config: RunConfig, workdir: str) -> None:
  """Logs the explained variances and writes them to `workdir/oracle_<phase>.json`."""
  record = check_critic(config, located(workdir), _PHASE.value, _TRAJECTORIES.value)
  path = located(workdir) / f"oracle_{_PHASE.value}.json"
  path.write_text(json.dumps(metrics.to_json(record), indent=2, allow_nan=False) + "\n", encoding="utf-8")
  shown = (f"{name} {record[name]:.3f}" for name in ("reward_mean", "oracle", "prompt", "critic"))
  logging.info("%s, %d trajectories: %s.", _PHASE.value, record["trajectories"], ", ".join(shown))


if __name__ == "__main__":
  _flags.run(main, writes=False)
