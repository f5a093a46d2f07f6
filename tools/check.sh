#!/usr/bin/env bash
# Every static check; runs all of them and fails if any did. `bash tools/check.sh --fix` formats.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests

failed=()
check() {
    echo "== $*"
    "$VENV/bin/$1" "${@:2}" || failed+=("$1")
}

if [ "${1:-}" = --fix ]; then
    "$VENV/bin/ruff" format --quiet
    "$VENV/bin/ruff" check --fix --quiet
fi
check ruff format --check --quiet
check ruff check --quiet
# Import-linter's banner and basedpyright's baseline hints are noise here.
check basedpyright --level error --pythonpath "$VENV/bin/python"
check lint-imports --no-logo
# Nouns in docstrings, not clauses that begin with "what".
check python tools/words.py
# The files of the project alone: your own texts and tokenizers may lie in this folder, too.
echo "== codespell"
git ls-files -z | xargs -0 "$VENV/bin/codespell" || failed+=(codespell)
# The first line of a module is a noun phrase, not a question.
echo "== first lines of modules"
git ls-files 'titan_loop/*.py' 'train_configs/*.py' 'tools/*.py' | xargs awk '
    FNR == 1 && /^"""(What|Which|How|Whether) / { print FILENAME ": " $0; found = 1 }
    END { exit found }' || failed+=("first lines")
if [ ${#failed[@]} -gt 0 ]; then
    echo "tools/check.sh: failed: ${failed[*]}" >&2
    exit 1
fi
echo "tools/check.sh: all clean"
