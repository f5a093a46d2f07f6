#!/usr/bin/env bash
# Trains the arms of train_configs/shipped_loops that have no result yet, and prints their tables.
#
#   bash tools/shipped_loops.sh
#
# Every run leaves train_configs/shipped_loops/results/shipped_loops/ARM_TASK_RATE-seedS.json. What
# is there is skipped, and a run that was interrupted goes on from its newest checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

full_corpus
"$VENV/bin/python" -m tools.shipped_loops
titan_loop results show shipped_loops
