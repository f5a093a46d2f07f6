#!/usr/bin/env bash
# Trains and examines the arms of train_configs/depth_pays.py, and prints their tables.
#
#   bash tools/depth_pays.sh [--rates | --tuned] [--again] [--seeds "1 2 3"] [ARM...]
#
# --rates, --tuned: the arms of depth_pays_rates or depth_pays_tuned instead.
# Every arm leaves train_configs/results/RECIPE/ARM-seedS.json. What is there is skipped, unless
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

for seed in $seeds; do
    for arm in "${stages[@]}"; do
        if recorded "train_configs/results/$recipe/$arm-seed$seed.json"; then
            continue
        fi
        stage "$arm, seed $seed"
        folder=runs/$recipe-seed$seed$again
        order=()
        if [ $recipe = depth_pays_tuned ]; then
            order=(--dataloader.seed "$seed")
        fi
        titan_loop train $recipe --stage "$arm" --dump-folder "$folder" --debug.seed "$seed" "${order[@]}"
        case $recipe-$arm in # the tables of rates have the trained R alone
            depth_pays_rates-*) depths=("${arm:1:1}") ;;
            depth_pays_tuned-looped_*) depths=(4) ;;
            depth_pays_tuned-*) depths=(1) ;;
            *) depths=(1 2 4 8) ;;
        esac
        titan_loop eval "$folder/$arm" --windows 128 --depths "${depths[@]}"
        if [ "$arm" = grown_averaged ]; then
            titan_loop eval "$folder/$arm" --windows 128 --depths 1 2 4 8 --ema
        fi
        titan_loop results add "$folder/$arm"
    done
done
titan_loop results show $recipe
