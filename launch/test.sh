#!/usr/bin/env bash
# Lints and tests the project; arguments go to pytest, as in: launch/test.sh -x tests/test_algorithm_advantage.py
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
use_environment "envs,report,test,notebooks,aot"

cd "$repository"
# The tests run on simulated CPU devices, whatever this machine has and whatever the caller has set.
export JAX_PLATFORMS=cpu
unset XLA_FLAGS PYTEST_ADDOPTS
"$python" -m ruff check .
"$python" -m pytest -q "$@" </dev/null
