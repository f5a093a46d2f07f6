#!/usr/bin/env bash
# The multi-process tests of titan_loop/distributed on torch 2.15, which a machine with a GPU gets.
#
#   bash tools/test_torch215.sh [partial_dtensor|spmd_types] [PYTEST ARGUMENTS]
#
# Without a backend it runs both. The environment sees everything in the main one behind its own
# packages, which are torch 2.15 and what that wants otherwise: several gigabytes of CUDA libraries,
# unless TITAN_LOOP_TORCH_INDEX names an index of CPU builds. It is kept until pyproject changes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests

backends=(partial_dtensor spmd_types)
case "${1:-}" in
    partial_dtensor | spmd_types)
        backends=("$1")
        shift
        ;;
esac

folder=$VENV/torch215
wanted="$(cat "$VENV/titan-loop-stamp") $(cksum <tools/test_torch215.sh)"
if [ ! -f "$folder/stamp" ] || [ "$(cat "$folder/stamp")" != "$wanted" ]; then
    layered_environment "$folder"
    setup_stage "environment torch 2.15" "$folder/bin/python" -m pip install \
        --only-binary=:all: --progress-bar off --no-compile --upgrade \
        ${TITAN_LOOP_TORCH_INDEX:+--index-url "$TITAN_LOOP_TORCH_INDEX"} torch==2.15.0
    echo "$wanted" >"$folder/stamp"
fi

export OMP_NUM_THREADS=1 TITAN_LOOP_REQUIRE=multiprocess
status=0
for backend in "${backends[@]}"; do
    echo "== torch $("$folder/bin/python" -c 'import torch; print(torch.__version__)'), $backend"
    TITAN_LOOP_TEST_SPMD_BACKEND=$backend \
        "$folder/bin/python" -m pytest tests/distributed -m multiprocess "$@" || status=1
done
exit $status
