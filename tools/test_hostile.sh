#!/usr/bin/env bash
# Damaged and crafted files against everything that reads them; see tests/hostile/README.md.
#
#   bash tools/test_hostile.sh [CASES]   300 by default, at most three minutes on two cores
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
half=$((${1:-300} / 2))
# Children are forked from a process without threads, so not from pytest-xdist's.
TITAN_LOOP_HOSTILE_CASES=0:$half "$VENV/bin/python" -m pytest -q -m hostile tests/hostile &
TITAN_LOOP_HOSTILE_CASES=$half:$half "$VENV/bin/python" -m pytest -q -m hostile tests/hostile/test_corpus.py ||
    status=$?
wait $! || status=$?
exit ${status:-0}
