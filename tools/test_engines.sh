#!/usr/bin/env bash
# The tests of exported models in llama.cpp, which comes as a wheel (xllamacpp) into an environment
# of its own.
#
#   bash tools/test_engines.sh [PYTEST ARGUMENTS]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests

install_engines() { # install_engines FOLDER: pyproject's group, and nothing of the main environment
    local -a group
    mapfile -t group < <(requirements engines)
    rm -rf "$1"
    "$VENV/bin/python" -m venv "$1"
    "$1/bin/python" -m pip install --only-binary=:all: --progress-bar off "${group[@]}"
}

folder=$VENV/engines
wanted="$(requirements engines) $("$VENV/bin/python" -V)"
if [ ! -f "$folder/stamp" ] || [ "$(cat "$folder/stamp")" != "$wanted" ]; then
    setup_stage "environment engines" install_engines "$folder"
    echo "$wanted" >"$folder/stamp"
fi
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TITAN_LOOP_REQUIRE=engines \
    TITAN_LOOP_ENGINES_PYTHON=$folder/bin/python \
    "$VENV/bin/python" -m pytest -q -m engines tests/families "$@"
