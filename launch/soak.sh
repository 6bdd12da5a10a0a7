#!/usr/bin/env bash
# A toy run among faults of every kind, for some minutes; before a release, by hand:
#
#   launch/soak.sh [SECONDS]      1200 by default
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

use_environment "envs,report,test"
cd "$repository"
export JAX_PLATFORMS=cpu PYTHONPATH="$repository:$repository/tests"
exec "$python" -m soak.soak "$@"
