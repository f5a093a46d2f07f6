#!/usr/bin/env bash
# All tests, on a fresh machine with only Python 3.11 or later; those on a real SLURM are in
# tools/test_slurm.sh, those of damaged and crafted files in tools/test_hostile.sh,
# short runs that must learn in tools/test_effects.sh.
#
#   bash tools/test.sh [--durations] [PYTEST ARGUMENTS]
#
# --durations fails when set-up, unit or multi-process tests exceed their budgets (for two cores) and
# lists the slowest tests.
# TITAN_LOOP_REQUIRE=multiprocess,… forbids to skip tests so marked.
set -euo pipefail

SETUP_BUDGET_SECONDS=300
export TITAN_LOOP_TEST_BUDGETS="unit=600,evaluation=240,multiprocess=540"

enforce=0
if [ "${1:-}" = --durations ]; then
    enforce=1
    shift
    set -- --durations=15 "$@"
    export TITAN_LOOP_ENFORCE_BUDGETS=1
fi

SECONDS=0
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup_seconds=$SECONDS
echo "set-up: $setup_seconds s of $SETUP_BUDGET_SECONDS s"

status=0
"$VENV/bin/python" -m pytest -m "not slurm and not hostile and not effects" "$@" || status=$?
if [ $enforce = 1 ] && [ "$setup_seconds" -gt $SETUP_BUDGET_SECONDS ]; then
    echo "tools/test.sh: set-up took $setup_seconds s, its budget is $SETUP_BUDGET_SECONDS s" >&2
    status=1
fi
exit $status
