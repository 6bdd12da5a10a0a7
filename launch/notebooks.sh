#!/usr/bin/env bash
# Executes the notebooks on CPUs and stores their outputs in them; after every change of one, or of what it shows:
#
#   launch/notebooks.sh                    all of them, some minutes
#   launch/notebooks.sh 02_losses          one
#   launch/notebooks.sh --address=https://github.com/OWNER/sao_jax    where Colab finds them; nothing is executed
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
use_environment "report,aot,notebooks"

unset XLA_FLAGS
export JAX_PLATFORMS=cpu PYTHONPATH="$repository:$repository/tests"
exec "$python" -m tools.notebooks "$@"
