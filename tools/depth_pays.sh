#!/usr/bin/env bash
# Trains and examines the arms of train_configs/depth_pays, and prints their tables.
#
#   bash tools/depth_pays.sh [--rates | --tuned] [--unclean] [--again] [--seeds "1 2 3"] [ARM...]
#
# --rates, --tuned: the arms of depth_pays_rates or depth_pays_tuned instead.
# Every arm leaves train_configs/depth_pays/results/RECIPE/ARM-seedS.json. What is there is skipped, unless
# --again asks for it, and an arm that was interrupted goes on from its newest checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

recipe=depth_pays
case "${1:-}" in
    --rates | --tuned)
        recipe=depth_pays_${1#--}
        shift
        ;;
esac
seeds="1 2 3"
choose $recipe "$@"

full_corpus

flags_of() {
    flags=()
    if [ $recipe = depth_pays_tuned ]; then
        flags=(--dataloader.seed "$2")
    fi
}
examine() {
    local depths=(1 2 4 8)
    case $recipe-$1 in # the tables of rates have the trained R alone
        depth_pays_rates-*) depths=("${1:1:1}") ;;
        depth_pays_tuned-looped_* | depth_pays_tuned-every_step_*) depths=(4) ;;
        depth_pays_tuned-*) depths=(1) ;;
    esac
    titan_loop eval "$2" --windows 128 --depths "${depths[@]}"
    if [ "$1" = grown_averaged ]; then
        titan_loop eval "$2" --windows 128 --depths 1 2 4 8 --ema
    fi
}
train_arms $recipe
