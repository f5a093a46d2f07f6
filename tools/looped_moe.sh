#!/usr/bin/env bash
# Trains and examines the arms of looped_moe_small in train_configs/moe.py, and prints their tables.
#
#   bash tools/looped_moe.sh [--settings] [--unclean] [--again] [--seeds "1 2 3"] [ARM...]
#
# --settings: the arms of looped_moe_settings instead.
# Every arm leaves train_configs/results/RECIPE/ARM-seedS.json. What is there is skipped, unless
# --again asks for it, and an arm that was interrupted goes on from its newest checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

recipe=looped_moe_small
if [ "${1:-}" = --settings ]; then
    recipe=looped_moe_settings
    shift
fi
seeds="1 2 3"
choose $recipe "$@"

full_corpus

examine() {
    local steps=1
    case $1 in
        *_r4) steps=4 ;;
        looped_*) steps=2 ;;
    esac
    titan_loop eval "$2" --windows 128 --depths $steps
}
train_arms $recipe
