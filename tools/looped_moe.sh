#!/usr/bin/env bash
# Trains and examines the arms of looped_moe_small in train_configs/moe, and prints their tables.
#
#   bash tools/looped_moe.sh [--unclean] [--again] [--seeds "1 2 3"] [ARM...]
#
# Every arm leaves train_configs/moe/results/looped_moe_small/ARM-seedS.json. What is there is skipped,
# unless --again asks for it, and an arm that was interrupted goes on from its newest checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

seeds="1 2 3"
choose looped_moe_small "$@"

full_corpus

examine() {
    local steps=1
    case $1 in
        *_r4) steps=4 ;;
        looped_*) steps=2 ;;
    esac
    titan_loop eval "$2" --windows 128 --depths $steps
}
train_arms looped_moe_small
