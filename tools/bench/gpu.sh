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
exec "$VENV/bin/python" tools/bench/gpu.py "$@"
