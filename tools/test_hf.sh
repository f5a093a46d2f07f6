#!/usr/bin/env bash
# The tests of exported folders in transformers, one environment per supported major version.
#
#   bash tools/test_hf.sh [PYTEST ARGUMENTS]
#
# Each environment sees everything in the main one behind its own packages, so that torch is there
# already and only what a version of transformers wants otherwise is installed on top (datatrove then
# finds an older huggingface_hub than it asks for; these tests do without it). Kept until pyproject
# changes. Releases are pinned there, as a minor version of transformers 5 renames arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests

# What pip finds in the main environment it cannot replace: that lies outside of the environment it
# installs into. The constraint keeps it from laying another torch on top.
install_transformers() { # install_transformers MARKER FOLDER: pyproject's group of that name
    local -a group
    mapfile -t group < <(requirements "$1")
    layered_environment "$2"
    echo "torch==$(usable_torch "$VENV/bin/python")" >"$2/constraints.txt"
    "$2/bin/python" -m pip install --only-binary=:all: --progress-bar off --no-compile --upgrade \
        -c "$2/constraints.txt" "${group[@]}"
}

# Others import datatrove, which this environment's huggingface_hub is too old for.
mapfile -t files < <(grep -rlw transformers tests/families --include='test_*.py')
status=0
for marker in hf4 hf5; do
    folder=$VENV/$marker
    wanted="$(cat "$VENV/titan-loop-stamp") $(cksum <tools/test_hf.sh)"
    if [ ! -f "$folder/stamp" ] || [ "$(cat "$folder/stamp")" != "$wanted" ]; then
        setup_stage "environment $marker" install_transformers $marker "$folder"
        echo "$wanted" >"$folder/stamp"
    fi
    echo "== $marker: transformers $("$folder/bin/python" -c 'import importlib.metadata as m; print(m.version("transformers"))')"
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TITAN_LOOP_REQUIRE=$marker \
        HF_HUB_OFFLINE=1 HF_HOME=$folder/hf-home \
        "$folder/bin/python" -m pytest -m $marker "${files[@]}" "$@" || status=1
done
exit $status
