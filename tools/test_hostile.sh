#!/usr/bin/env bash
# Damaged and crafted files against everything that reads them; see tests/hostile/README.md.
#
#   bash tools/test_hostile.sh [--cases N]   300 by default, at most three minutes on two cores
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests
export OMP_NUM_THREADS=1
"$VENV/bin/python" -m pytest -q -m hostile tests/hostile
"$VENV/bin/python" -m tests.hostile "$@"
