#!/usr/bin/env bash
# Trains the stages of train_configs/physics/small.py, prints their tables and fits the scaling law.
#
#   bash tools/physics.sh [--exams] [--unclean] [--again] [--seeds "1 2 3"] [STAGE...]
#
# --exams: the stages of physics_exams instead.
# Every stage leaves train_configs/physics/results/RECIPE/STAGE-seedS.json. What is there is skipped,
# unless --again asks for it, and a stage that was interrupted goes on from its newest checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

recipe=physics_small
if [ "${1:-}" = --exams ]; then
    recipe=physics_exams
    shift
fi
seeds=1
choose $recipe "$@"

if [[ " ${stages[*]}" == *" scaling_"* || " ${stages[*]}" == *" prior_"* ]]; then
    full_corpus
fi

for seed in $seeds; do
    folder=runs/$recipe-seed$seed$again
    for name in "${stages[@]}"; do
        if recorded "train_configs/physics/results/$recipe/$name-seed$seed.json"; then
            continue
        fi
        stage "$name, seed $seed"
        titan_loop train $recipe --stage "$name" --dump-folder "$folder" \
            --debug.seed "$seed" --dataloader.seed "$seed"
        titan_loop results add "$folder/$name" "${unclean[@]}" "${into[@]}"
    done
    scaling=("$folder"/scaling_*)
    if [ ${#scaling[@]} = 9 ]; then
        titan_loop scaling "${scaling[@]}" --output "$folder/scaling"
    fi
done
titan_loop results show $recipe "${into[@]}"
tell_skipped
