#!/usr/bin/env bash
# Lints and tests the project, several files at a time; further arguments go to pytest:
#
#   launch/test.sh                        everything
#   launch/test.sh --fast                 for work in between: without the tests that tests/slow.txt lists
#   launch/test.sh tests/rollout -k take  some of it; -n0 runs it in one process, as --pdb wants it
#
# Options of its own, before all others:
#   --parity     installs torch, transformers and swebench, too (large), and compares with them
#   --optimized  compiles as production does; otherwise quickly, which changes the last digit at most
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

extras="envs,textarena,openenv,verifiers,data,judge,serve,agents,report,wandb,trackio,test,notebooks,aot"
selected=()
unset XLA_FLAGS PYTEST_ADDOPTS
while true; do
  case "${1:-}" in
    --parity) extras+=",parity,swebench" ;;
    --fast) selected=(-m "not slow") ;;
    --optimized)
      export XLA_FLAGS="--xla_backend_optimization_level=3 --xla_cpu_use_fusion_emitters=true"
      export JAX_OPTIMIZATION_LEVEL=UNKNOWN # of programs for TPUs: libtpu's own
      ;;
    *) break ;;
  esac
  shift
done
use_environment "$extras"
# Only for the published chat templates among its files: the packages that it needs itself are not installed.
[[ "$extras" != *parity* ]] || "$python" -m pip install --quiet --disable-pip-version-check --no-deps trl==1.16.0
# Tests of sandboxes are skipped without it, and say so.
if ! command -v bwrap >/dev/null && [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
  echo "Installing bubblewrap ..."
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap >/dev/null ||
    echo "It could not be installed." >&2
fi

cd "$repository"
# The tests run on simulated CPU devices, whatever this machine has.
export JAX_PLATFORMS=cpu
# Workers and the programs that tests start read the bytecode that the first of them has written.
unset PYTHONDONTWRITEBYTECODE
# Workers share the cores: torch's threads would wait for one another.
export OMP_NUM_THREADS=1
"$python" -m ruff check .
# One worker more than there are cores, since many tests wait for time-outs. Whole files go to a worker: their tests
# share what a module has compiled and trained.
cores="$(env -u OMP_NUM_THREADS nproc)"
workers=(-n "$((cores < 7 ? cores + 1 : 8))" --dist=loadfile --no-loadscope-reorder)
"$python" -m pytest -q "${workers[@]}" ${selected[@]+"${selected[@]}"} "$@" </dev/null
