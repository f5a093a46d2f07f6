#!/usr/bin/env bash
# Ouro's whole recipe in miniature: data, all stages and the fork, plots, depths, exit policies and a
# report. On a fresh machine with only Python 3.11 or later.
#
#   bash tools/miniature.sh          18 minutes of CPU time for training, see train_configs/LOG.md
#   bash tools/miniature.sh --short  1/32 of the tokens, to see that all of it works
#
# What is complete is skipped and an interrupted stage continues; to start over, remove the folders
# printed at the end.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

VOCABULARY=1024
LONG_WINDOW=1024 CHAT_WINDOW=512 # of the stages that read packed windows
name=miniature
code_mb=3 prose_mb=3 math_mb=2 chat_mb=0.8
windows=16
case "${1:-}" in
"") ;;
--short)
    name=miniature_short
    code_mb=0.6 prose_mb=0.6 math_mb=0.4 chat_mb=0.2
    windows=4
    ;;
*)
    echo "titan-loop: error: unknown flag $1 for miniature.sh; known: --short" >&2
    exit 2
    ;;
esac
corpus=corpora/$name
run=runs/$name

stage() {
    printf '\n== %s\n' "$*"
}
titan_loop() {
    "$VENV/bin/titan-loop" "$@"
}

SECONDS=0
stage "1/6 corpus: code, prose, mathematics and chats from this Python installation"
if [ ! -f "$corpus/text/card.json" ]; then
    titan_loop data local-python "$corpus/text" --held-out-fraction 0.1 \
        --code-megabytes $code_mb --prose-megabytes $prose_mb --math-megabytes $math_mb
fi
if [ ! -f "$corpus/text/chat/card.json" ]; then
    titan_loop data local-chats "$corpus/text/chat" --held-out-fraction 0.1 --megabytes $chat_mb
fi

stage "2/6 tokenizer ($VOCABULARY tokens), token shards, packed windows"
if [ ! -f "$corpus/tokenizer.json" ]; then
    titan_loop data train-tokenizer "$corpus"/text/{code,prose,math}/train.jsonl \
        --vocab-size $VOCABULARY --output "$corpus/tokenizer.json"
fi
prepare() { # prepare NAME PACKED_WINDOW FLAGS...: tokenise one source, and pack it if it is read so
    local source="$corpus/$1" window=$2 text="$corpus/text/$1"
    if [ ! -f "$source/source.json" ]; then
        titan_loop data tokenize "$text"/train.jsonl --held-out-inputs "$text"/held_out.jsonl \
            --output "$source" --tokenizer "$corpus/tokenizer.json" \
            --licence "see $corpus/text" "${@:3}"
    fi
    if [ -n "$window" ] && [ ! -f "$source/train/packed_$window.windows" ]; then
        titan_loop data pack "$source" --seq-len "$window" --long-documents split
    fi
}
prepare code $LONG_WINDOW
prepare prose $LONG_WINDOW
prepare math ""
prepare chat $CHAT_WINDOW --chat
titan_loop data plan $name

stage "3/6 training: 1a, then five stages of each branch"
titan_loop train $name

stage "4/6 what duplicating the layers alone does to the loss"
rm -rf "$run-upcycled"
titan_loop upcycle "$run/1a" --output "$run-upcycled" --layers 8 --report --windows $windows

stage "5/6 stages"
titan_loop status "$run"

stage "6/6 plots; depths, exit policies and the report of the gate stage"
titan_loop plot "$run"
titan_loop eval "$run/gate" --frontier --windows $windows
titan_loop report "$run/gate"

printf '\nminiature: %d s. Data: %s, runs: %s\n' $SECONDS "$corpus" "$run"
