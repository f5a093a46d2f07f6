#!/usr/bin/env bash
# Trains the arms of train_configs/shipped_loops that have no result yet, and prints their tables.
#
#   bash tools/shipped_loops.sh [--decoding]
#
# Every run leaves a JSON in train_configs/shipped_loops/results. What is there is skipped, and a run
# that was interrupted goes on from its newest checkpoint.
# --decoding: instead, bytes and milliseconds of decoding in MLX by wider models with random weights.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

full_corpus
if [ "${1:-}" = --decoding ]; then
    source tools/engines.sh
    engine_environment mlx
    place=$(mktemp -d)
    folders=()
    for each in loop:nanbeige loopcoder:loopcoder dense:llama-unrolled; do
        arm=${each%:*}
        titan_loop train shipped_loops --stage "${arm}_text_1e-2" --dump-folder "$place" \
            --model.dim 512 --model.n-heads 8 --model.n-kv-heads 8 --model.hidden-dim 1536 \
            --training.steps 1 --training.local-batch-size 1 --held-out.interval 0
        titan_loop convert export "$place/${arm}_text_1e-2" --to "${each#*:}" --output "$place/$arm"
        folders+=("$arm=$place/$arm")
    done
    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
        "$VENV/mlx/bin/python" tools/bench/mlx_decoding.py "${folders[@]}"
    rm -r "$place"
    exit
fi
"$VENV/bin/python" -m tools.shipped_loops
titan_loop results show shipped_loops
