#!/usr/bin/env bash
# Every table that needs a GPU, for the one or eight GPUs of this machine, in at most 30 minutes;
# with --cpu, or where there is no GPU, the same code on tiny shapes in about 3 minutes.
#
#   bash tools/bench/gpu.sh [--cpu] [--again] [--output FOLDER] [TABLE ...]
#
# tools/bench/README.md lists the tables. They stand in FOLDER/README.md and FOLDER/TABLE.json.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
set_up_tests # the table `parity` runs cases of tests/distributed
PYTHON=$VENV/bin/python
# torchao, for the table `float8`, stays out of the main environment; tools/test_float8.sh uses the same.
if [ -d "$VENV/float8" ] || [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]]; then
    source tools/group_environment.sh
    group_environment float8
    PYTHON=$VENV/float8/bin/python
fi
exec "$PYTHON" tools/bench/gpu.py "$@"
