#!/usr/bin/env bash
# Static checks and tests without a family: its folders and recipes are deleted in a worktree.
#
#   bash tools/without_family.sh NAME [PYTEST ARGUMENTS]     latent, adaptive, discoloop or recurrent_depth
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=${1:?"usage: bash tools/without_family.sh NAME [PYTEST ARGUMENTS]"}
shift
if [ ! -d "titan_loop/families/$name" ] || [ "$name" = ouro ]; then
    echo "titan-loop: error: NAME=$name is not a family that can be deleted; ls titan_loop/families" >&2
    exit 2
fi
source tools/setup.sh
set_up_tests
tree=$(mktemp -d)
trap 'git worktree remove --force "$tree"' EXIT
git worktree add --quiet --detach "$tree"
cd "$tree"
git rm -rq "titan_loop/families/$name" "tests/families/$name"
git rm -rq --ignore-unmatch "train_configs/$name" "tests/train_configs/$name"
# The environment imports titan_loop from the checkout unless another stands before it.
export PYTHONPATH=$tree
# Pages that list its recipes: tests try every command that they name.
"$VENV/bin/python" -m tools.reproduce
sed -i "/titan-loop plan $name/d" titan_loop/planning/rehearsals.md
"$VENV/bin/ruff" check --quiet
"$VENV/bin/lint-imports" --no-logo
"$VENV/bin/basedpyright" --level error --pythonpath "$VENV/bin/python"
"$VENV/bin/python" -m pytest -q -n 2 --dist loadfile \
    -m "not slurm and not hostile and not effects" "$@"
