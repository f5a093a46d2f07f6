#!/usr/bin/env bash
# Trains the stages of train_configs/scaling_small, prints their table and fits the scaling law.
#
#   bash tools/scaling.sh [--unclean] [--again] [--seeds "1 2 3"] [STAGE...]
#
# Every stage leaves train_configs/scaling_small/results/scaling_small/STAGE-seedS.json. What is there is skipped,
# unless --again asks for it, and a stage that was interrupted goes on from its newest checkpoint.
# The law is fitted to the runs of all seeds, whose losses go to train_configs/scaling_small/results/
# scaling_small.csv; where the runs are not on this machine, it is fitted to that table.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

recipe=scaling_small
seeds="1 2 3"
choose $recipe "$@"

full_corpus

train_arms $recipe

stage "the law"
shopt -s nullglob
table=train_configs/scaling_small/results/$recipe.csv
results=(train_configs/scaling_small/results/$recipe/*.json)
runs=()
for folder in "runs/$recipe"-seed*/; do
    [[ "$folder" = *-again/ ]] || runs+=("$folder"d*_r*)
done
output=runs/$recipe
# At R = 8 the loss of the narrowest layer falls last, within half of its tokens.
skip=(--skip 0.5)
if [ ${#runs[@]} = ${#results[@]} ]; then
    titan_loop scaling "${runs[@]}" "${skip[@]}" --output "$output"
    cp "$output/losses.csv" "$table"
elif [ -f "$table" ]; then
    titan_loop scaling --csv "$table" "${skip[@]}" --output "$output"
fi
