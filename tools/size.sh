#!/usr/bin/env bash
# The counts by which a cut of this code base is measured, of the files that git tracks. No gate.
#
#   bash tools/size.sh              # the working tree
#   bash tools/size.sh HEAD~20      # a revision
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

files=$(git ls-files)
if [ $# -gt 0 ]; then
    files=$(git ls-tree -r --name-only "$1") || {
        echo "titan-loop: error: no revision $1; usage: tools/size.sh [REVISION]" >&2
        exit 2
    }
    folder=$(mktemp -d "${TMPDIR:-/tmp}/titan-loop-size.XXXXXX")
    trap 'rm -rf "$folder"' EXIT
    git archive "$1" | tar -x -C "$folder"
    cd "$folder"
fi

chosen() { # chosen PATTERN: the files whose path matches; a deleted one is still tracked
    grep -E "$1" <<<"$files" | while IFS= read -r file; do [ ! -f "$file" ] || printf '%s\0' "$file"; done
}
lines() { # lines FOLDER: lines of Python below it
    chosen "^$1/.*\.py$" | xargs -0 -r cat | wc -l
}
row() { # row WHAT NUMBER
    printf "%-70s %'9d\n" "$1" "$2"
}
longest() { # longest FOLDER
    printf '\nten longest modules of %s/\n' "$1"
    chosen "^$1/.*\.py$" | xargs -0 -r grep -c '' /dev/null | sort -t: -k2 -rn | sed -n 1,10p |
        while IFS=: read -r file count; do row "  $file" "$count"; done
}

package=$(lines titan_loop) families=$(lines titan_loop/families) recipes=$(lines train_configs) tests=$(lines tests)
row "lines of Python in titan_loop/" "$package"
row "  without titan_loop/families/" $((package - families))
row "  titan_loop/families/" "$families"
row "train_configs/" "$recipes"
row "titan_loop/ + train_configs/" $((package + recipes))
row "tests/" "$tests"
awk -v tests="$tests" -v code="$package" \
    'BEGIN { printf "%-70s %9.2f\n", "  lines of test per line of titan_loop/", tests / code }'
row "words of Markdown" "$(chosen '\.md$' | xargs -0 -r cat | wc -w)"
longest titan_loop
longest tests
