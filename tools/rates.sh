#!/usr/bin/env bash
# Trains the arms of train_configs/rates.py, and prints their table: the best rate by R and width.
#
#   bash tools/rates.sh [--muon | --boundary] [--unclean] [--again] [--seeds "1 2"] [ARM...]
#
# --muon, --boundary: the arms of rates_muon or of boundary instead.
# Every arm leaves train_configs/results/RECIPE/ARM-seedS.json. What is there is skipped, unless
# --again asks for it, and an arm that was interrupted goes on from its newest checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

recipe=rates
case ${1:-} in
    --muon) recipe=rates_muon ;;
    --boundary) recipe=boundary ;;
esac
[ $recipe = rates ] || shift
seeds="1 2"
choose $recipe "$@"

full_corpus

train_arms $recipe
