#!/usr/bin/env bash
# Trains the arms of train_configs/rates.py, and prints their table: the best rate by R and width.
#
#   bash tools/rates.sh [--muon] [--unclean] [--again] [--seeds "1 2"] [ARM...]
#
# --muon: the arms of rates_muon instead.
# Every arm leaves train_configs/results/RECIPE/ARM-seedS.json. What is there is skipped, unless
# --again asks for it, and an arm that was interrupted goes on from its newest checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

recipe=rates
if [ "${1:-}" = --muon ]; then
    recipe=rates_muon
    shift
fi
seeds="1 2"
choose $recipe "$@"

full_corpus

train_arms $recipe
