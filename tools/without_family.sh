#!/usr/bin/env bash
# Static checks and tests without a family: its folders and recipes are deleted in a worktree.
#
#   bash tools/without_family.sh NAME [PYTEST ARGUMENTS]     any folder of titan_loop/families but ouro
#
# What is made of it goes along: family folders whose name has it as a part (xllm_moe), studies that
# import it, with their tests, and single files of tools/ and tests/ that do.
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
git rm -rq --ignore-unmatch "titan_loop/families/*_$name/*" "titan_loop/families/${name}_*/*" \
    "tests/families/*_$name/*" "tests/families/${name}_*/*" "train_configs/$name" "tests/train_configs/$name"
uses() { git grep -lE "(titan_loop|tests)\.families\.(\w+_)?$name(_\w+)?\b" -- "$@" || true; }
for study in $(uses 'train_configs/*.py' | cut -d/ -f2 | sort -u); do
    git rm -rq --ignore-unmatch "train_configs/$study" "tests/train_configs/$study"
done
uses 'tools/*.py' 'tests/*.py' | xargs -r git rm -q
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
