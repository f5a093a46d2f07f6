#!/usr/bin/env bash
# Runs the tests, on a fresh machine with only Python 3.11 or later. Tests that start several ranks
# run with --all, or if you name files. tools/test_slurm.sh tests a real SLURM, tools/test_hostile.sh
# damaged and crafted files, tools/test_effects.sh short runs that must learn.
#
#   bash tools/test.sh [--all] [PYTEST ARGUMENTS]
#
# Two files run at a time; -n 0 runs them one after another in this process, as --pdb needs.
# A test that takes twenty minutes hangs: every thread's stack is printed, and the session ends.
# The ten slowest files are printed at the end.
# TITAN_LOOP_REQUIRE=multiprocess,… forbids to skip tests so marked.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests
kinds="not slurm and not hostile and not effects"
if [ "${1:-}" = --all ]; then
    shift
elif [[ "$*" != *tests* ]]; then
    kinds+=" and not multiprocess"
fi
# Or every process that a test starts compiles the package again, and every worker all tests.
unset PYTHONDONTWRITEBYTECODE
"$VENV/bin/python" -m pytest -n 2 --dist loadfile --max-worker-restart 0 \
    -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true \
    -m "$kinds" "$@"
