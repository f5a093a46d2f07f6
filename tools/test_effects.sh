#!/usr/bin/env bash
# Short training runs that must show what looping is for; tests/effects.
#
#   bash tools/test_effects.sh [PYTEST ARGUMENTS]     twelve minutes on one core
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_NUM_THREADS=1
"$VENV/bin/python" -m pytest -q -m effects tests/effects "$@"
