#!/usr/bin/env bash
# The whole method on a small multi-turn tool task: imitation, value pretraining, asynchronous SAO, evaluation, report.
#
#     launch/quickstart.sh [WORKDIR] [FLAGS...]      as in: launch/quickstart.sh runs/seed1 --seed=1
#
# FLAGS go to every launcher. Stopped and run again, it goes on where it was.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

workdir="$repository/runs/quickstart"
if [[ $# -gt 0 && "$1" != -* ]]; then
  workdir="$1"
  shift
  [[ "$workdir" == /* ]] || workdir="$PWD/$workdir"
fi

use_environment "envs,report"
cd "$repository"
SECONDS=0
# A launcher that is interrupted saves and exits, with a status of its own; what builds on it must not start then.
trap 'exit 75' INT TERM
for program in sft pretrain_value train evaluate report; do
  echo "== launch.$program (after ${SECONDS} s)"
  "$python" -m "launch.$program" --config=configs/calculator.py --workdir="$workdir" "$@"
done
echo
echo "Done in ${SECONDS} s. The report: $workdir/report/index.html"
