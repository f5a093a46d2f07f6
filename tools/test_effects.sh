#!/usr/bin/env bash
# Short training runs that must show what looping is for, two at a time; tests/effects.
#
#   bash tools/test_effects.sh [PYTEST ARGUMENTS]     seven minutes on two cores
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests
"$VENV/bin/python" -m pytest -q -n 2 --dist worksteal -m effects tests/effects tests/train_configs "$@"
