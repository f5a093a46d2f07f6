#!/usr/bin/env bash
# Trains and examines the stages of train_configs/depth_read.py, and prints their tables.
#
#   bash tools/depth_read.sh [--again] [--seeds "1 2 3"] [STAGE...]
#
# Every stage leaves train_configs/results/depth_read/STAGE-seedS.json. What is there is skipped,
# unless --again asks for it, and a stage that was interrupted goes on from its newest checkpoint. A
# stage ARM_gate or ARM_ahead starts from ARM of the same seed, which has to be there or before it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

seeds="1 2 3"
choose depth_read "$@"

full_corpus

for seed in $seeds; do
    folder=runs/depth_read-seed$seed$again
    for name in "${stages[@]}"; do
        if recorded "train_configs/results/depth_read/$name-seed$seed.json"; then
            continue
        fi
        stage "$name, seed $seed"
        flags=()
        case $name in
        *_gate | *_ahead) ;; # has a seed of its own for the data
        mano_* | hops_*) flags=(--dataloader.seed "$seed") ;;
        esac
        titan_loop train depth_read --stage "$name" --dump-folder "$folder" --debug.seed "$seed" "${flags[@]}"
        task=() # text, if there is none
        case $name in
        mano_*) task=(--tasks mano) ;;
        hops_*) task=(--tasks layered_qa) ;;
        *) titan_loop eval "$folder/$name" --windows 128 --depths 1 2 3 4 8 ;;
        esac
        case $name in
        r[0-9]) ;;
        *) titan_loop eval "$folder/$name" --frontier --windows 128 "${task[@]}" ;;
        esac
        case $name in # Stage II leaves these as they were
        *_gate | *_ahead | r[0-9] | mano_* | hops_*) ;;
        *) titan_loop analyse prefill "$folder/$name" ;;
        esac
        titan_loop results add "$folder/$name"
    done
done
titan_loop results show depth_read
