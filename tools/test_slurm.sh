#!/usr/bin/env bash
# The tests that need SLURM, on a cluster of five nodes that this machine pretends to be.
#
#   bash tools/test_slurm.sh [PYTEST ARGUMENTS]
#
# Needs root and Debian's packages, see tools/slurm_host.sh; where that cannot be had it says so and
# succeeds, unless TITAN_LOOP_REQUIRE=slurm.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests

folder=$(mktemp -d "${TMPDIR:-/tmp}/titan-loop-slurm.XXXXXX")
trap 'bash tools/slurm_host.sh stop "$folder"; rm -rf "$folder"' EXIT
SECONDS=0
status=0
bash tools/slurm_host.sh start "$folder" 5 || status=$?
if [ $status = 77 ] && [[ ,${TITAN_LOOP_REQUIRE:-}, != *,slurm,* ]]; then
    echo "tools/test_slurm.sh: skipped" >&2
    exit 0
fi
[ $status = 0 ] || exit $status
echo "set-up: SLURM in $SECONDS s"

export SLURM_CONF=$folder/slurm.conf OMP_NUM_THREADS=1
TITAN_LOOP_REQUIRE=slurm "$VENV/bin/python" -m pytest -m slurm tests/launch "$@" || status=$?
exit $status
