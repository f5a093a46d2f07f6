#!/usr/bin/env bash
# Writes tools/constraints/: for every supported Python the newest versions, all of them wheels, that
# pyproject.toml with its extras and the group `dev` allows together. tools/setup.sh installs these.
#
#   bash tools/constraints.sh
#
# Resolved by uv, which can do so for a Python that is not here, in an environment thrown away
# afterwards. Not in the files: torch, which tools/setup.sh chooses by the machine, and packages that
# exist only as sources (see the group `no-deps` in pyproject.toml).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=$(mktemp -d "${TMPDIR:-/tmp}/titan-loop-constraints.XXXXXX")
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --only-binary=:all: uv
for name in torch word2number sqlitedict; do
    echo "$name; sys_platform == 'never'"
done >"$folder/left-out.txt"

for version in 3.11 3.12 3.13 3.14; do
    "$folder/bin/uv" pip compile pyproject.toml --all-extras --group dev --upgrade \
        --only-binary :all: --override "$folder/left-out.txt" \
        --python-version $version --python-platform x86_64-manylinux_2_28 \
        --no-header --no-annotate --quiet --output-file "tools/constraints/py${version/./}.txt"
    echo "tools/constraints/py${version/./}.txt"
done
