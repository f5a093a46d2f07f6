#!/usr/bin/env bash
# Trains and examines the stages of train_configs/depth_read, and prints their tables.
#
#   bash tools/depth_read.sh [--unclean] [--again] [--seeds "1 2 3"] [STAGE...]
#
# Every stage leaves train_configs/depth_read/results/depth_read/STAGE-seedS.json. What is there is skipped,
# unless --again asks for it, and a stage that was interrupted goes on from its newest checkpoint. A
# stage ARM_gate or _long starts from ARM of the same seed, which has to be there or before it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

seeds="1 2 3"
choose depth_read "$@"

full_corpus

flags_of() {
    flags=()
    case $1 in
        *_gate | *_long) ;; # has a seed of its own for the data
        mano_* | hops_* | *_2e-2) flags=(--dataloader.seed "$2") ;;
    esac
}
examine() {
    local task=() # text, if there is none
    case $1 in
        mano_*) task=(--tasks commuted_mano) ;;
        hops_*) task=(--tasks layered_paths) ;;
        *) titan_loop eval "$2" --windows 128 --depths 1 2 3 4 8 ;;
    esac
    case $1 in
        r[0-9] | *_2e-2) ;;
        *) titan_loop eval "$2" --frontier --windows 128 "${task[@]}" ;;
    esac
    case $1 in # Stage II leaves these as they were
        *_gate | *_long | r[0-9] | mano_* | hops_* | *_2e-2) ;;
        *) titan_loop analyse prefill "$2" ;;
    esac
}
train_arms depth_read
