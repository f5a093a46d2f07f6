#!/usr/bin/env bash
# The tests of exported folders in transformers, one environment per supported major version.
#
#   bash tools/test_hf.sh [PYTEST ARGUMENTS]
#
# `tools/group_environment.sh` says how they are made. These tests do without datatrove.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests

source tools/group_environment.sh

# Others import datatrove, which this environment's huggingface_hub is too old for.
mapfile -t files < <(grep -rlwE 'transformers|trl' tests/families tests/contracts tests/rl --include='test_*.py')
status=0
for marker in hf4 hf5; do
    folder=$VENV/$marker
    group_environment $marker
    echo "== $marker: transformers $("$folder/bin/python" -c 'import importlib.metadata as m; print(m.version("transformers"))')"
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TITAN_LOOP_REQUIRE=$marker \
        HF_HUB_OFFLINE=1 HF_HOME=$folder/hf-home \
        "$folder/bin/python" -m pytest -m $marker "${files[@]}" "$@" || status=1
done
exit $status
