#!/usr/bin/env bash
# Puts plausible faults into a copy of the package, one at a time, and looks if a test notices; for hours, by hand,
# before a release. What survives is a test to write, or is listed in CONTRIBUTING.md:
#
#   launch/mutate.sh                                  150 faults in algorithm, rollout, sampler and training
#   launch/mutate.sh --count=0 algorithm/tokens.py    all those of a file
#   launch/mutate.sh --help                           further options
#
# The same command goes on where an earlier one stopped; results are in mutation.jsonl of the current folder.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
use_environment "envs,data,report,test,notebooks,aot"

export OMP_NUM_THREADS=1
unset XLA_FLAGS PYTEST_ADDOPTS
PYTHONPATH="$repository/tests" exec "$python" -m tools.mutate "$@"
