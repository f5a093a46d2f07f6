#!/usr/bin/env bash
# Trains the arms of train_configs/rates, and prints their tables.
#
#   bash tools/rates.sh [--boundary] [--unclean] [--again] [--seeds "1 2"] [ARM...]
#
# --boundary: the arms of boundary instead, with seeds 1, 2 and 3.
# Every arm leaves train_configs/rates/results/RECIPE/ARM-seedS.json. What is there is skipped, unless
# --again asks for it, and an arm that was interrupted goes on from its newest checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh

recipe=rates
seeds="1 2"
if [ "${1:-}" = --boundary ]; then
    recipe=boundary seeds="1 2 3"
    shift
fi
choose $recipe "$@"

full_corpus

examine() { # held-out text at the R that the arm trains with
    local steps
    steps=$("$VENV/bin/python" -c "import sys
from titan_loop.recipes.registry import load_recipe
print(load_recipe(sys.argv[1]).stage(sys.argv[2]).config.model.recurrent_steps)" $recipe "$1")
    titan_loop eval "$2" --windows 128 --depths "$steps"
}

train_arms $recipe
