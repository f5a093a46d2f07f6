#!/usr/bin/env bash
# Trains the arms of train_configs/rewards, asks each its exam, and prints their tables.
#
#   bash tools/rewards.sh [--unclean] [--again] [--seeds "0 2 3"] [STAGE...]
#
# Every arm leaves train_configs/rewards/results/rewards/STAGE-seedS.json. What is there is skipped, unless
# --again asks for it. An arm starts from the parent of its seed, which is trained first.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

seeds="0 2 3"
choose rewards "$@"

flags_of() {
    flags=(--dataloader.seed "$2")
    # Seeds learn at their own pace; with these tokens a parent answers 30 to 60 % of the exam.
    case $1-$2 in
        parent-2) flags+=(--total-tokens 820000 --learning-rate "0:0 linear 100K:1e-2 cosine 820K:1e-3") ;;
    esac
}
examine() {
    titan_loop analyse answers "$2"
}
train_arms rewards
