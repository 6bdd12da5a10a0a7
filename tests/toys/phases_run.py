"""Phases of the toy run one after the other, by the processes that the environment's variables join.

python tests/toys/phases_run.py WORKDIR PHASES FIELD=LITERAL ...   with PHASES as in sft,value_pretraining,train
"""

from __future__ import annotations

import ast
import sys

from absl import logging

from sao_jax.configuration import config_tree
from sao_jax.parallel.process import initialize_processes, leave_processes
from toys import training_toy


def main(workdir: str, names: str, *overrides: str) -> None:
  """Runs the phases with the fields that differ from those of the toy run."""
  logging.set_verbosity(logging.INFO)
  initialize_processes()
  from sao_jax.training import loop  # joined before anything may ask for devices
  from sao_jax.training.sft import sft

  values = dict(override.split("=", 1) for override in overrides)
  values = {field: ast.literal_eval(value) for field, value in values.items()}
  config = config_tree.replace(training_toy.get_config(), values)
  run = {"sft": sft, "value_pretraining": loop.pretrain_value, "train": loop.train}
  for name in names.split(","):
    run[name](config, workdir)
  leave_processes()


if __name__ == "__main__":
  main(*sys.argv[1:])
