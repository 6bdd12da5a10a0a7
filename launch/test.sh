#!/usr/bin/env bash
# Lints and tests the project; arguments go to pytest, as in: launch/test.sh -x tests/test_algorithm_advantage.py
# With --parity first, torch and transformers are installed too (large), and our models are compared with theirs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
extras="envs,report,test,notebooks,aot"
if [[ "${1:-}" == --parity ]]; then
  extras+=",parity"
  shift
fi
use_environment "$extras"

cd "$repository"
# The tests run on simulated CPU devices, whatever this machine has and whatever the caller has set.
export JAX_PLATFORMS=cpu
unset XLA_FLAGS PYTEST_ADDOPTS
"$python" -m ruff check .
"$python" -m pytest -q "$@" </dev/null
