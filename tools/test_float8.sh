#!/usr/bin/env bash
# The tests of float8 with torchao, in an environment of its own.
#
#   bash tools/test_float8.sh [PYTEST ARGUMENTS]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests

source tools/group_environment.sh
group_environment float8
# torchao's sources have an escape sequence that Python warns of as it compiles them.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TITAN_LOOP_REQUIRE=float8 \
    "$VENV/float8/bin/python" -m pytest -q -m float8 -W "ignore:invalid escape sequence" \
    tests/distributed/test_float8.py "$@"
