#!/usr/bin/env bash
# The parity tests on torch 2.15 with gloo, for both SPMD backends.
#
# Not in CI: outside PyTorch's own CPU index torch 2.15 comes with several gigabytes of CUDA
# libraries. The README records the last run. The environment is its own, and kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export TITAN_LOOP_VENV=${TITAN_LOOP_VENV_TORCH215:-.venv-torch215}
if [ ! -x "$TITAN_LOOP_VENV/bin/python" ]; then
    python3 -m venv "$TITAN_LOOP_VENV"
fi
if ! "$TITAN_LOOP_VENV/bin/python" -c 'import importlib.metadata as m, sys
sys.exit(not m.version("torch").startswith("2.15.0"))' 2>/dev/null; then
    "$TITAN_LOOP_VENV/bin/python" -m pip install ${TITAN_LOOP_TORCH_INDEX:+--index-url "$TITAN_LOOP_TORCH_INDEX"} \
        torch==2.15.0
fi
source tools/setup.sh # keeps the torch it finds

export OMP_NUM_THREADS=1 TITAN_LOOP_REQUIRE=multiprocess
# What is compared with one process is the layout, so a GPU must not take over on this machine.
export CUDA_VISIBLE_DEVICES=
status=0
for backend in partial_dtensor spmd_types; do
    echo "== torch 2.15.0, $backend"
    TITAN_LOOP_TEST_SPMD_BACKEND=$backend \
        "$VENV/bin/python" -m pytest tests/distributed -m multiprocess "$@" || status=1
done
exit $status
