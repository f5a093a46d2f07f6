#!/usr/bin/env bash
# Trains the arms of few_bits (train_configs/nanbeige), writes each as a GGUF of every type, reads held-out
# text with llama.cpp, and prints the table of titan_loop/formats/ENGINES.md.
#
#   bash tools/few_bits.sh [--unclean] [--again] [--seeds "1 2 3"] [ARM...]
#
# Every arm leaves train_configs/nanbeige/results/few_bits/ARM-seedS.json. What is there is skipped, unless
# --again asks for it, and an arm that was interrupted goes on from its newest checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source tools/corpus.sh
source tools/engines.sh

seeds="1 2 3"
choose few_bits "$@"

full_corpus

# The main environment without the wheel, whose folder holds nothing else that it has.
wheel=$("$ENGINES/bin/python" -c 'import site; print(site.getsitepackages()[0])')
examine() {
    PYTHONPATH=$wheel${PYTHONPATH:+:$PYTHONPATH} "$VENV/bin/python" -m tools.few_bits "$2"
}
train_arms few_bits
