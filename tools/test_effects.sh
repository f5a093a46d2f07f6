#!/usr/bin/env bash
# Short training runs that must show what looping is for; tests/effects, its files side by side.
#
#   bash tools/test_effects.sh [PYTEST ARGUMENTS]     seven minutes on two cores
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_NUM_THREADS=1
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$logs"' EXIT

declare -A started
for file in tests/effects/test_*.py; do
    "$VENV/bin/python" -m pytest -q -m effects "$file" "$@" >"$logs/${file##*/}" 2>&1 &
    started[$file]=$!
done
status=0
for file in "${!started[@]}"; do
    wait "${started[$file]}" || status=$?
    cat "$logs/${file##*/}"
done
exit $status
