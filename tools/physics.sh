#!/usr/bin/env bash
# Trains the stages of train_configs/physics_small.py, prints their tables and fits the scaling law.
#
#   bash tools/physics.sh [--unclean] [--again] [--seeds "1 2 3"] [STAGE...]
#
# Every stage leaves train_configs/results/physics_small/STAGE-seedS.json. What is there is skipped,
# unless --again asks for it, and a stage that was interrupted goes on from its newest checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

seeds=1
choose physics_small "$@"

if [[ " ${stages[*]}" == *" scaling_"* || " ${stages[*]}" == *" prior_"* ]]; then
    full_corpus
fi

for seed in $seeds; do
    folder=runs/physics_small-seed$seed$again
    for name in "${stages[@]}"; do
        if recorded "train_configs/results/physics_small/$name-seed$seed.json"; then
            continue
        fi
        stage "$name, seed $seed"
        titan_loop train physics_small --stage "$name" --dump-folder "$folder" \
            --debug.seed "$seed" --dataloader.seed "$seed"
        titan_loop results add "$folder/$name" "${unclean[@]}"
    done
    scaling=("$folder"/scaling_*)
    if [ ${#scaling[@]} = 9 ]; then
        titan_loop scaling "${scaling[@]}" --output "$folder/scaling"
    fi
done
titan_loop results show physics_small
