#!/usr/bin/env bash
# Trains and examines the arms of train_configs/depth_pays.py, and prints their tables.
#
#   bash tools/depth_pays.sh [--rates] [--seeds "1 2 3"] [ARM...]
#
# --rates: those of depth_pays_rates instead.
# Every arm leaves train_configs/results/RECIPE/ARM-seedS.json. What is there is skipped, and an
# arm that was interrupted goes on from its newest checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

recipe=depth_pays
if [ "${1:-}" = --rates ]; then
    recipe=depth_pays_rates
    shift
fi
seeds="1 2 3"
choose $recipe "$@"

full_corpus

for seed in $seeds; do
    for arm in "${stages[@]}"; do
        if [ -f "train_configs/results/$recipe/$arm-seed$seed.json" ]; then
            continue
        fi
        stage "$arm, seed $seed"
        folder=runs/$recipe-seed$seed
        titan_loop train $recipe --stage "$arm" --dump-folder "$folder" --debug.seed "$seed"
        depths=(1 2 4 8)
        if [ $recipe = depth_pays_rates ]; then
            depths=("${arm:1:1}") # its table has the trained R alone
        fi
        titan_loop eval "$folder/$arm" --windows 128 --depths "${depths[@]}"
        if [ "$arm" = grown_averaged ]; then
            titan_loop eval "$folder/$arm" --windows 128 --depths 1 2 4 8 --ema
        fi
        titan_loop results add "$folder/$arm"
    done
done
titan_loop results show $recipe
