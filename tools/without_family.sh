#!/usr/bin/env bash
# Static checks and tests without a family: its folders and recipes are deleted in a worktree.
#
#   bash tools/without_family.sh NAME [PYTEST ARGUMENTS]     any folder of titan_loop/families but ouro
#
# What is made of it goes along: family folders whose name has it as a part (xllm_moe), studies that
# import it, with their tests, single files of tools/ and tests/ that import either, and the cases that
# name a recipe of theirs first.
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
recipes() {
    "$VENV/bin/python" -c "from titan_loop.recipes.registry import recipe_summaries; print(*recipe_summaries(), sep='\n')"
}
before=$(recipes)
cd "$tree"
git rm -rq "titan_loop/families/$name" "tests/families/$name"
git rm -rq --ignore-unmatch "titan_loop/families/*_$name/*" "titan_loop/families/${name}_*/*" \
    "tests/families/*_$name/*" "tests/families/${name}_*/*" "train_configs/$name" "tests/train_configs/$name"
uses() { # uses WHAT FILES: the files that import WHAT, or what is named after it
    git grep -lE "$1(_\w+)?\b" -- "${@:2}" || true
}
family="(titan_loop|tests)\.families\.(\w+_)?$name"
studies=$(uses "$family|from \.\.$name" 'train_configs/*.py' | cut -d/ -f2 | sort -u)
for study in $studies; do
    git rm -rq --ignore-unmatch "train_configs/$study" "tests/train_configs/$study"
done
for gone in "$family" $(printf 'train_configs\.%s ' "$name" $studies); do
    uses "$gone" 'tools/*.py' 'tests/*.py' | xargs -r git rm -q
done
# The environment imports titan_loop from the checkout unless another stands before it.
export PYTHONPATH=$tree
lost=$(comm -23 <(sort <<<"$before") <(recipes | sort))
cases=$(printf '%s' "$lost" | sed 's/.*/or [&-/' | tr '\n' ' ')
# Pages that list its recipes: tests try every command that they name.
"$VENV/bin/python" -m tools.reproduce
for recipe in $lost; do
    sed -Ei "/titan-loop (plan|train) $recipe\b/d" titan_loop/planning/rehearsals.md COMPARISON.md
done
sed -Ei "/^(    |\|).*titan-loop $name /d" README.md COMPARISON.md # its verb
"$VENV/bin/ruff" check --quiet
"$VENV/bin/lint-imports" --no-logo
"$VENV/bin/basedpyright" --level error --pythonpath "$VENV/bin/python"
"$VENV/bin/python" -m pytest -q -n 2 --dist loadfile \
    -m "not slurm and not hostile and not effects" ${cases:+-k "not (${cases#or })"} "$@"
